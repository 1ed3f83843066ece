"""Launch of the Triton kernel, which is imported then, so that this module needs no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._triton_support import explain_tensors, round_up_to_power_of_two

__all__ = ["explain", "norm_and_rotate"]

_MAX_HEAD_DIM = 1024
_TILE = 1024  # elements of a program


def explain(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Tensor, eps: float
) -> str | None:
    """Return why the Triton kernel does not support a call, or None."""
    named = [("x", x), ("weight", weight), ("cos", cos), ("sin", sin), ("out", out)]
    reason = explain_tensors(named)
    if reason is None and x.shape[2] > _MAX_HEAD_DIM:
        reason = f"the head size is {x.shape[2]}, the kernel takes up to {_MAX_HEAD_DIM}"
    return reason


def norm_and_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Tensor, eps: float
) -> None:
    """Launch the kernel; arguments as `api.norm_and_rotate`."""
    from hybridspec.ops.rotary.triton_rotary import norm_and_rotate_kernel

    num_rows, num_heads, head_dim = x.shape
    if num_rows == 0:
        return
    block_d = round_up_to_power_of_two(head_dim)
    block_h = min(max(_TILE // block_d, 1), round_up_to_power_of_two(num_heads))
    with torch.cuda.device_of(x):
        norm_and_rotate_kernel[(num_rows, -(-num_heads // block_h))](
            x, weight, cos, sin, out, eps, num_heads, *x.stride()[:2], weight.stride(0),
            cos.stride(0), sin.stride(0), *out.stride()[:2],
            D=head_dim,
            ROTARY=cos.shape[-1],
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=4 if block_h * block_d >= 512 else 1,
            enable_fp_fusion=True,
        )  # fmt: skip
