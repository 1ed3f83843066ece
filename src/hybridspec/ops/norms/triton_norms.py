"""Triton kernel that norms the heads of a row, and gates them where there is a gate."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rms_norm_kernel"]


@triton.jit
def rms_norm_kernel(
    # inputs: x [N, heads, D]; gate [N, heads, D] or None; weight [heads, D]
    x_ptr,
    gate_ptr,
    weight_ptr,
    # output [N, heads, D]
    out_ptr,
    eps,
    num_heads,
    x_stride_n,
    x_stride_h,
    gate_stride_n,
    gate_stride_h,
    weight_stride_h,
    out_stride_n,
    out_stride_h,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d_offs = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < num_heads) & (d_offs < D)

    x_ptrs = x_ptr + row * x_stride_n + heads * x_stride_h + d_offs
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + heads * weight_stride_h + d_offs, mask=mask, other=0.0)

    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None] * weight.to(tl.float32)
    if gate_ptr is not None:
        gate_ptrs = gate_ptr + row * gate_stride_n + heads * gate_stride_h + d_offs
        gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
        y *= gate * tl.sigmoid(gate)

    out_ptrs = out_ptr + row * out_stride_n + heads * out_stride_h + d_offs
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)
