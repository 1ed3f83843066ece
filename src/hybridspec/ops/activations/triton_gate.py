"""Triton kernel that multiplies rows with a function of their gates."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gate_kernel"]


@triton.jit
def gate_kernel(
    # inputs: x, gate [N, D]
    x_ptr,
    gate_ptr,
    # output [N, D]
    out_ptr,
    size,
    x_stride_n,
    gate_stride_n,
    out_stride_n,
    BLOCK: tl.constexpr,
    IS_SILU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d_offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d_offs < size

    x = tl.load(x_ptr + row * x_stride_n + d_offs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride_n + d_offs, mask=mask, other=0.0).to(tl.float32)

    y = x * tl.sigmoid(gate)
    if IS_SILU:
        y *= gate

    tl.store(out_ptr + row * out_stride_n + d_offs, y.to(out_ptr.dtype.element_ty), mask=mask)
