"""Triton kernels that copy and clear whole slots of a pool."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["reset_slots_kernel", "write_slots_kernel"]


@triton.jit
def element_offsets(index, size_1, size_2, stride_0, stride_1, stride_2):
    """Offsets of the elements numbered `index` inside one slot of shape [*, size_1, size_2]."""
    inner = index % size_2
    middle = index // size_2 % size_1
    outer = index // size_2 // size_1
    return outer * stride_0 + middle * stride_1 + inner * stride_2


@triton.jit
def write_slots_kernel(
    # output pool [S, size_0, size_1, size_2]
    pool_ptr,
    # inputs: values [P, size_0, size_1, size_2], contiguous; slots [P]
    values_ptr, src_slots_ptr, dst_slots_ptr,
    num_elements, size_1, size_2, stride_s, stride_0, stride_1, stride_2,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    src = tl.load(src_slots_ptr + pair).to(tl.int64)
    dst = tl.load(dst_slots_ptr + pair).to(tl.int64)
    mask = index < tl.where(tl.minimum(src, dst) >= 0, num_elements, 0)
    offs = element_offsets(index, size_1, size_2, stride_0, stride_1, stride_2)

    values = tl.load(values_ptr + pair * num_elements + index, mask=mask)

    tl.store(pool_ptr + dst * stride_s + offs, values, mask=mask)


@triton.jit
def reset_slots_kernel(
    # in-out pool [S, size_0, size_1, size_2]
    pool_ptr,
    # input [B]
    slots_ptr,
    num_elements, size_1, size_2, stride_s, stride_0, stride_1, stride_2,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    mask = index < tl.where(slot >= 0, num_elements, 0)
    offs = element_offsets(index, size_1, size_2, stride_0, stride_1, stride_2)

    zeros = tl.zeros([BLOCK], tl.int32).to(pool_ptr.dtype.element_ty)

    tl.store(pool_ptr + slot * stride_s + offs, zeros, mask=mask)
