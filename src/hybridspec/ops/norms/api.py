"""The public functions of the RMS norm: checks, output allocation, operator call."""

from __future__ import annotations

from torch import Tensor

from hybridspec.ops._checks import FLOATS, WIDE, Dims, check, check_dtype, check_last_stride
from hybridspec.ops._library import register_kernel
from hybridspec.ops.norms import launch, reference

__all__ = ["add_rms_norm", "gated_rms_norm", "rms_norm"]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """RMS-normalise the last dimension; nothing is modified.

    y = x / sqrt(mean(x^2) + eps) * weight

    Args:
        x: [N, D] or [N, heads, D], any strides whose last is 1; in.
        weight: the whole factor, [D], or [heads, D] where every head has its own; fp32 or fp64;
            last stride 1; in.
        eps: added to the mean square.
        out: where to write, shape and dtype of `x`; last stride 1; out.
        backend: "auto", "triton" or "reference".

    Returns:
        The norm in the shape and dtype of `x`.

    Raises:
        TypeError: for a dtype that is not supported.
        UnsupportedError: if the requested backend does not support the call.
        ValueError: for a wrong shape, stride or backend.

    Numerics:
        In the dtype of `weight`, rounded once at the end.

    Source:
        RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), equation 4.
    """
    return _run(x, None, weight, eps, out, backend)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *,
    out: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """RMS-normalise the last dimension and multiply with silu(gate); nothing is modified.

    y = x / sqrt(mean(x^2) + eps) * weight * silu(gate)

    Arguments, result, errors and numerics as in `rms_norm`, but for one:

    Args:
        gate: shape of `x`, any strides whose last is 1; in.

    Source:
        The output norm of Gated Delta Networks (Yang et al. 2025, arXiv:2412.06464), section 3.4.
    """
    return _run(x, gate, weight, eps, out, backend)


def add_rms_norm(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, *,
    out: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Add the parts of a product to rows, and RMS-normalise these; only `residual` is modified.

    residual += sum of parts;  y = residual / sqrt(mean(residual^2) + eps) * weight

    Args:
        parts: [P, N, D], fp32 or fp64, last stride 1; in.
        residual: [N, D], any strides whose last is 1; in-out.
        weight: the whole factor, [D], dtype of `parts`; last stride 1; in.
        eps: added to the mean square.
        out: where to write the norm, shape and dtype of `residual`; last stride 1; out.
        backend: "auto", "triton" or "reference".

    Returns:
        The norm in the shape and dtype of `residual`.

    Raises:
        TypeError, UnsupportedError, ValueError: as `rms_norm`.

    Numerics:
        Parts are added in their order, then the residual, and the sum is rounded to its dtype
        once; what is rounded is normed in the dtype of `weight`, and rounded once.

    Source:
        See `rms_norm`.
    """
    if out is None and isinstance(residual, Tensor):
        out = residual.new_empty(residual.shape)
    _add_op(parts, residual, weight, out, eps, backend=backend)
    return out


def _run(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, out: Tensor | None, backend: str
) -> Tensor:
    if out is None and isinstance(x, Tensor):
        out = x.new_empty(x.shape)
    _op(x, gate, weight, out, eps, backend=backend)
    return out


def _check(x: Tensor, gate: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    check_dtype("x", x, *FLOATS)
    check_dtype("weight", weight, *WIDE)
    check_last_stride("x", x)
    check_last_stride("weight", weight)
    if weight.shape not in (x.shape[-1:], x.shape[-2:]) or weight.ndim >= x.ndim:
        raise ValueError(
            f"weight: expected the last dimension of x, or the last two of [N, heads, D], "
            f"got {list(weight.shape)} for x {list(x.shape)}"
        )
    for name, tensor in (("gate", gate), ("out", out)):
        if tensor is not None:
            check_last_stride(name, tensor)
            if tensor.shape != x.shape:
                raise ValueError(
                    f"{name}: expected the shape of x {list(x.shape)}, got {list(tensor.shape)}"
                )
    if gate is not None:
        check_dtype("gate", gate, *FLOATS)
    check_dtype("out", out, x.dtype)


def _check_add(parts: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    dims: Dims = {}
    check("parts", parts, "P N D", dims)
    check("residual", residual, "N D", dims)
    check("weight", weight, "D", dims)
    check("out", out, "N D", dims)
    check_dtype("parts", parts, *WIDE)
    check_dtype("weight", weight, parts.dtype)
    check_dtype("residual", residual, *FLOATS)
    check_dtype("out", out, residual.dtype)
    named = {"parts": parts, "residual": residual, "weight": weight, "out": out}
    for name, tensor in named.items():
        check_last_stride(name, tensor)
    if parts.shape[0] == 0:
        raise ValueError("parts: expected one or more, got 0")


_op = register_kernel("norms.rms_norm", launch.explain, launch.rms_norm, reference.rms_norm, _check)
_add_op = register_kernel(
    "norms.add_rms_norm",
    launch.explain_add,
    launch.add_rms_norm,
    reference.add_rms_norm,
    _check_add,
)
