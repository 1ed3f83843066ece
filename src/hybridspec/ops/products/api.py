"""The public function: contract, output allocation, operator call."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._checks import FLOATS, Dims, check, check_dtype, check_last_stride
from hybridspec.ops._library import register_kernel
from hybridspec.ops.products import cpu, launch

__all__ = ["explain_multiply", "multiply", "multiply_in_parts"]


def multiply(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Multiply rows with a weight; nothing is modified.

        y = x W^T (+ residual)

    Args:
        x: rows, [N, D]; last stride 1; in.
        weight: [F, D], dtype of `x`; last stride 1; in.
        residual: added, [N, F], dtype of `x`; last stride 1; in.
        dtype: of the result; None is that of `x`.
        backend: "auto", "triton" or "reference".

    Returns:
        [N, F].

    Raises:
        TypeError: for a dtype that is not supported.
        UnsupportedError: if the requested backend does not support the call.
        ValueError: for a wrong shape, stride, device or backend.

    Numerics:
        Sums in fp32 (fp64 if `x` is), the residual added to them, then rounded once.
        "triton": the bits of a row are a function of the row and the weight, whatever other rows
        there are. A sum is cut into parts by the weight's shape alone, each added up from its
        first term on and then in order; tiles follow the number of rows.

    Source:
        README.md of this package.
    """
    out = x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype or x.dtype)
    _multiply(x, weight, residual, out, backend=backend)
    return out


def multiply_in_parts(x: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """Multiply rows with a weight, and leave the parts that the sums are cut into; as `multiply`.

    Whoever adds them in their order, and then a residual, has what `multiply` would have given.

    Args:
        x, weight, backend: as in `multiply`.

    Returns:
        [P, N, F], fp32 (fp64 if `x` is); P is a function of the weight's shape.

    Raises:
        TypeError, UnsupportedError, ValueError: as `multiply`.
    """
    num = launch.num_parts(*weight.shape)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    parts = x.new_empty((num, x.shape[0], weight.shape[0]), dtype=wide)
    _in_parts(x, weight, parts, backend=backend)
    return parts


def explain_multiply(
    x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor
) -> dict[str, str | None]:
    """Return for each backend, by preference, why it does not support a call, or None."""
    return _multiply.explain(x, weight, residual, out)


def _check(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> None:
    dims: Dims = {}
    check("x", x, "N D", dims)
    check("weight", weight, "F D", dims)
    named = {"x": x, "weight": weight, "out": out}
    if residual is not None:
        check("residual", residual, "N F", dims)
        check_dtype("residual", residual, x.dtype)
        named["residual"] = residual
    check("out", out, "N F", dims)
    check_dtype("x", x, *FLOATS)
    check_dtype("weight", weight, x.dtype)
    check_dtype("out", out, *FLOATS)
    for name, tensor in named.items():
        check_last_stride(name, tensor)


def _check_in_parts(x: Tensor, weight: Tensor, parts: Tensor) -> None:
    _check(x, weight, None, parts[0])


_in_parts = register_kernel(
    "products.multiply_in_parts",
    launch.explain_in_parts,
    launch.multiply_in_parts,
    cpu.multiply_in_parts,
    _check_in_parts,
)
_multiply = register_kernel(
    "products.multiply", launch.explain, launch.multiply, cpu.multiply, _check
)
