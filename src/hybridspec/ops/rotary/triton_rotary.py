"""Triton kernel that norms and rotates the heads of a row in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["norm_and_rotate_kernel"]


@triton.jit
def norm_and_rotate_kernel(
    # inputs: x [N, heads, D]; weight [heads, D]; cos, sin [N, 1, ROTARY]
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    # output [N, heads, D]
    out_ptr,
    eps,
    num_heads,
    x_stride_n,
    x_stride_h,
    weight_stride_h,
    cos_stride_n,
    sin_stride_n,
    out_stride_n,
    out_stride_h,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d_offs = tl.arange(0, BLOCK_D)
    mask = (heads < num_heads)[:, None] & (d_offs < D)[None, :]
    is_rotated = d_offs < ROTARY
    partner = tl.where(d_offs < ROTARY // 2, d_offs + ROTARY // 2, d_offs - ROTARY // 2)
    partner_mask = mask & is_rotated[None, :]

    x_ptr += row * x_stride_n + heads[:, None] * x_stride_h
    weight_ptr += heads[:, None] * weight_stride_h
    x = tl.load(x_ptr + d_offs[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d_offs[None, :], mask=mask, other=0.0).to(tl.float32)
    x_partner = tl.load(x_ptr + partner[None, :], mask=partner_mask, other=0.0).to(tl.float32)
    w_partner = tl.load(weight_ptr + partner[None, :], mask=partner_mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * cos_stride_n + d_offs, mask=is_rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * sin_stride_n + d_offs, mask=is_rotated, other=0.0).to(tl.float32)

    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    y = inverse * (x * weight * cos[None, :] + x_partner * w_partner * sin[None, :])

    out_ptr += row * out_stride_n + heads[:, None] * out_stride_h
    tl.store(out_ptr + d_offs[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
