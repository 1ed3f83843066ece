"""The public function of norm and rotary embedding: checks, output allocation, operator call."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.errors import UnsupportedError
from hybridspec.ops._backends import choose_backend
from hybridspec.ops._checks import Dims, check, check_dtype, check_last_stride
from hybridspec.ops._library import register
from hybridspec.ops._triton_support import triton_or_reference
from hybridspec.ops.rotary import launch, reference

__all__ = ["backends", "norm_and_rotate"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WIDE = (torch.float32, torch.float64)
backends = triton_or_reference(launch.explain)


def norm_and_rotate(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """RMS-normalise every head, then rotate its first dimensions; nothing is modified.

    With R rotated dimensions, i' = i + R/2 for i < R/2 and i - R/2 for the others of them:

        z_i = x_i / sqrt(mean(x^2) + eps) * weight_i
        y_i = z_i cos_i + z_i' sin_i for i < R,  y_i = z_i elsewhere

    Args:
        x: query and key heads of packed rows, [N, heads, D], any strides whose last is 1; in.
        weight: the whole factor of every head, [heads, D], fp32 or fp64; last stride 1; in.
        cos: cosines of each row's angles, both halves, [N, 1, R], R even and at most D, dtype of
            `weight`; last stride 1; in.
        sin: sines, those of the first half negated, [N, 1, R], dtype of `weight`; last stride 1;
            in.
        eps: added to the mean square.
        out: where to write, [N, heads, D], dtype of `x`; last stride 1; out.
        backend: "auto", "triton" or "reference".

    Returns:
        [N, heads, D] in the dtype of `x`.

    Raises:
        TypeError: for a dtype that is not supported.
        UnsupportedError: if the backend asked for cannot serve the call.
        ValueError: for a wrong shape, stride or backend.

    Numerics:
        In the dtype of `weight`, rounded once at the end.

    Source:
        RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), equation 4; rotary embedding (Su et al.
        2021, arXiv:2104.09864), in the half-split order and on a part of the dimensions, as in the
        Qwen3-Next and Qwen3.5 checkpoints.
    """
    try:
        is_right = (
            x.shape[1:] == weight.shape
            and cos.shape == sin.shape == (x.shape[0], 1, cos.shape[2])
            and cos.shape[2] <= x.shape[2]
            and cos.shape[2] % 2 == 0
            and x.stride(2) == weight.stride(1) == cos.stride(2) == sin.stride(2) == 1
            and x.dtype in _FLOATS
            and weight.dtype in _WIDE
            and cos.dtype == sin.dtype == weight.dtype
        )
    except (AttributeError, IndexError, TypeError):  # no tensor, or of too few dimensions
        is_right = False
    if not is_right:
        _explain(x, weight, cos, sin)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    else:
        check("out", out, "N heads D", dict(zip(("N", "heads", "D"), x.shape, strict=True)))
        check_dtype("out", out, x.dtype)
        check_last_stride("out", out)
    _op(x, weight, cos, sin, eps, out, backend)
    return out


def _explain(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise the error that names the first wrong argument."""
    dims: Dims = {}
    check("x", x, "N heads D", dims)
    check("weight", weight, "heads D", dims)
    check("cos", cos, "N 1 R", dims)
    check("sin", sin, "N 1 R", dims)
    if dims["R"] % 2 or dims["R"] > dims["D"]:
        raise UnsupportedError(
            f"cos: expected an even number of dimensions up to {dims['D']}, got {dims['R']}"
        )
    for name, tensor in (("x", x), ("weight", weight), ("cos", cos), ("sin", sin)):
        check_last_stride(name, tensor)
    check_dtype("x", x, *_FLOATS)
    check_dtype("weight", weight, *_WIDE)
    check_dtype("cos", cos, weight.dtype)
    check_dtype("sin", sin, weight.dtype)


def _norm_and_rotate(x: Tensor, *args) -> None:
    *rest, backend = args
    name = choose_backend("rotary.norm_and_rotate", backend, backends(x), x, *rest)
    module = launch if name == "triton" else reference
    module.norm_and_rotate(x, *rest)


_op = register(
    "rotary_norm_and_rotate(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps, "
    "Tensor(a!) out, str backend)",
    _norm_and_rotate,
)
