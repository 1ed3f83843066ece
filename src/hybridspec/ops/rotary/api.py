"""The public function of norm and rotary embedding: checks, output allocation, operator call."""

from __future__ import annotations

from torch import Tensor

from hybridspec.errors import UnsupportedError
from hybridspec.ops._checks import FLOATS, WIDE, Dims, check_tensor
from hybridspec.ops._library import register_kernel
from hybridspec.ops.rotary import cpu, launch

__all__ = ["explain", "norm_and_rotate"]


def norm_and_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *,
    eps: float, out: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
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
        UnsupportedError: if the requested backend does not support the call.
        ValueError: for a wrong shape, stride or backend.

    Numerics:
        As `norms.rms_norm`: in the dtype of `weight`, rounded once at the end.

    Source:
        RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), equation 4; rotary embedding (Su et al.
        2021, arXiv:2104.09864), in the half-split order and on a part of the dimensions, as in the
        Qwen3-Next and Qwen3.5 checkpoints.
    """
    if out is None and isinstance(x, Tensor):
        out = x.new_empty(x.shape)
    _op(x, weight, cos, sin, out, eps, backend=backend)
    return out


def _check(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Tensor, eps: float) -> None:
    dims: Dims = {}
    check_tensor("x", x, "N heads D", dims, *FLOATS)
    check_tensor("weight", weight, "heads D", dims, *WIDE)
    check_tensor("cos", cos, "N 1 R", dims, weight.dtype)
    check_tensor("sin", sin, "N 1 R", dims, weight.dtype)
    if dims["R"] % 2 or dims["R"] > dims["D"]:
        raise UnsupportedError(
            f"cos: expected an even number of dimensions up to {dims['D']}, got {dims['R']}"
        )
    check_tensor("out", out, "N heads D", dims, x.dtype)


def explain(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Tensor, eps: float
) -> dict[str, str | None]:
    """Return for each backend, by preference, why it does not support a call, or None."""
    return _op.explain(x, weight, cos, sin, out, eps)


_op = register_kernel(
    "rotary.norm_and_rotate", launch.explain, launch.norm_and_rotate, cpu.norm_and_rotate, _check
)
