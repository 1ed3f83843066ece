"""Triton kernels that norm heads, and gate them where there is a gate, or rows that they add up."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_rms_norm_kernel", "rms_norm_kernel"]


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


@triton.jit
def add_rms_norm_kernel(
    # input: parts [P, N, D]
    parts_ptr,
    # in-out [N, D]
    residual_ptr,
    # input: weight [D]; output [N, D]
    weight_ptr,
    out_ptr,
    eps,
    parts_stride_p,
    parts_stride_n,
    residual_stride_n,
    out_stride_n,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d_offs = tl.arange(0, BLOCK_D)
    mask = d_offs < D

    parts_ptrs = parts_ptr + row * parts_stride_n + d_offs
    residual_ptrs = residual_ptr + row * residual_stride_n + d_offs
    total = tl.load(parts_ptrs, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(
            parts_ptrs + part * tl.cast(parts_stride_p, tl.int64), mask=mask, other=0.0
        )
    total += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d_offs, mask=mask, other=0.0)

    rounded = total.to(residual_ptr.dtype.element_ty)
    x = rounded.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps) * weight.to(tl.float32)

    tl.store(residual_ptrs, rounded, mask=mask)
    tl.store(out_ptr + row * out_stride_n + d_offs, y.to(out_ptr.dtype.element_ty), mask=mask)
