"""Triton kernels on cursors and slots: one small launch each, lengths read on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.triton_folds import is_fold_due

__all__ = [
    "commit_kernel",
    "decide_folds_kernel",
    "reset_slots_kernel",
    "restart_windows_kernel",
    "write_slots_kernel",
]


@triton.jit(do_not_specialize=["num_requests"])
def decide_folds_kernel(
    # inputs: history_len, ring_start [S], the latter or None; slots, num_verify_tokens [B]
    history_len_ptr,
    ring_start_ptr,
    slots_ptr,
    num_verify_tokens_ptr,
    # output [B]
    is_fold_ptr,
    num_requests,
    max_window,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = request < num_requests

    slot = tl.load(slots_ptr + request, mask=mask, other=-1).to(tl.int64)
    num_tokens = tl.load(num_verify_tokens_ptr + request, mask=mask, other=0)
    is_live = (slot >= 0) & (num_tokens > 0)
    history_len = tl.load(history_len_ptr + slot, mask=is_live, other=0)
    ring_start = -1
    if ring_start_ptr is not None:
        ring_start = tl.load(ring_start_ptr + slot, mask=is_live, other=0)

    is_fold = is_live & is_fold_due(slot, ring_start, history_len, num_tokens, max_window)

    tl.store(is_fold_ptr + request, is_fold.to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=["num_requests"])
def commit_kernel(
    # in-out: cursors [S]
    seq_len_ptr,
    ring_start_ptr,
    history_len_ptr,
    # inputs [B]; is_fold and num_verify_tokens are zeroed
    slots_ptr,
    is_fold_ptr,
    num_verify_tokens_ptr,
    num_committed_ptr,
    num_requests,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = request < num_requests

    slot = tl.load(slots_ptr + request, mask=mask, other=-1).to(tl.int64)
    is_live = slot >= 0
    is_fold = tl.load(is_fold_ptr + request, mask=is_live, other=0) != 0
    num_tokens = tl.load(num_verify_tokens_ptr + request, mask=is_live, other=0)
    committed = tl.load(num_committed_ptr + request, mask=is_live, other=0)
    seq_len = tl.load(seq_len_ptr + slot, mask=is_live, other=0)
    ring_start = tl.load(ring_start_ptr + slot, mask=is_live, other=0)
    history_len = tl.load(history_len_ptr + slot, mask=is_live, other=0)

    committed = tl.minimum(tl.maximum(committed, 0), num_tokens)
    folded = tl.where(is_fold, history_len, 0)

    tl.store(seq_len_ptr + slot, seq_len + committed, mask=is_live)
    tl.store(ring_start_ptr + slot, (ring_start + folded) % RING, mask=is_live)
    tl.store(history_len_ptr + slot, history_len - folded + committed, mask=is_live)
    zeros = tl.zeros([BLOCK], tl.int32)
    tl.store(is_fold_ptr + request, zeros.to(is_fold_ptr.dtype.element_ty), mask=mask)
    tl.store(
        num_verify_tokens_ptr + request,
        zeros.to(num_verify_tokens_ptr.dtype.element_ty),
        mask=mask,
    )


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
    values_ptr,
    src_slots_ptr,
    dst_slots_ptr,
    num_elements,
    size_1,
    size_2,
    stride_s,
    stride_0,
    stride_1,
    stride_2,
    BLOCK: tl.constexpr,
):
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
    num_elements,
    size_1,
    size_2,
    stride_s,
    stride_0,
    stride_1,
    stride_2,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    mask = index < tl.where(slot >= 0, num_elements, 0)
    offs = element_offsets(index, size_1, size_2, stride_0, stride_1, stride_2)

    zeros = tl.zeros([BLOCK], tl.int32).to(pool_ptr.dtype.element_ty)

    tl.store(pool_ptr + slot * stride_s + offs, zeros, mask=mask)


@triton.jit(do_not_specialize=["num_requests"])
def restart_windows_kernel(
    # in-out: cursors [B]
    ring_start_ptr,
    history_len_ptr,
    # input [B], or None: all have a slot
    slots_ptr,
    fold_threshold,
    num_requests,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = request < num_requests

    history_len = tl.load(history_len_ptr + request, mask=mask, other=0)
    ring_start = tl.load(ring_start_ptr + request, mask=mask, other=0)
    is_fold = mask & (history_len >= fold_threshold)
    if slots_ptr is not None:
        is_fold = is_fold & (tl.load(slots_ptr + request, mask=mask, other=-1) >= 0)

    tl.store(ring_start_ptr + request, (ring_start + history_len) & (RING - 1), mask=is_fold)
    tl.store(history_len_ptr + request, tl.zeros([BLOCK], tl.int32), mask=is_fold)
