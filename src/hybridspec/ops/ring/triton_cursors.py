"""Triton kernels on cursors: one small launch each, lengths read on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.ring.triton_fold_rule import is_fold_due

__all__ = ["commit_kernel", "decide_folds_kernel", "restart_windows_kernel"]


@triton.jit(do_not_specialize=["num_requests"])
def decide_folds_kernel(
    # inputs: history_len, ring_start [S], the latter or None; slots, num_verify_tokens [B]
    history_len_ptr, ring_start_ptr, slots_ptr, num_verify_tokens_ptr,
    # output [B]
    is_fold_ptr,
    num_requests, max_window,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
    seq_len_ptr, ring_start_ptr, history_len_ptr,
    # inputs [B]; is_fold and num_verify_tokens are zeroed
    slots_ptr, is_fold_ptr, num_verify_tokens_ptr, num_committed_ptr,
    num_requests,
    RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=["num_requests"])
def restart_windows_kernel(
    # in-out: cursors [B]
    ring_start_ptr, history_len_ptr,
    # input [B], or None: all have a slot
    slots_ptr,
    fold_threshold, num_requests,
    RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = request < num_requests

    history_len = tl.load(history_len_ptr + request, mask=mask, other=0)
    ring_start = tl.load(ring_start_ptr + request, mask=mask, other=0)
    is_fold = mask & (history_len >= fold_threshold)
    if slots_ptr is not None:
        is_fold = is_fold & (tl.load(slots_ptr + request, mask=mask, other=-1) >= 0)

    tl.store(ring_start_ptr + request, (ring_start + history_len) & (RING - 1), mask=is_fold)
    tl.store(history_len_ptr + request, tl.zeros([BLOCK], tl.int32), mask=is_fold)
