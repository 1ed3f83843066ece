"""Triton kernels on the cursors of blocks: a few numbers a request, one launch each."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["commit_blocks_kernel", "reset_blocks_kernel"]


@triton.jit(do_not_specialize=["num_requests"])
def commit_blocks_kernel(
    # in-out: cursors and marks [S]
    ring_start_ptr,
    history_len_ptr,
    is_fold_ptr,
    # inputs [B], and how far apart they are; blocks up to `padding` are none
    blocks_ptr,
    num_committed_ptr,
    block_stride,
    committed_stride,
    padding,
    num_requests,
    most_unmarked,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = request < num_requests

    block = tl.load(blocks_ptr + request * block_stride, mask=mask, other=-1).to(tl.int64)
    is_live = mask & (block > padding)
    committed = tl.load(num_committed_ptr + request * committed_stride, mask=is_live, other=0)
    is_fold = tl.load(is_fold_ptr + block, mask=is_live, other=0) != 0
    ring_start = tl.load(ring_start_ptr + block, mask=is_live, other=0)
    history_len = tl.load(history_len_ptr + block, mask=is_live, other=0)

    committed = committed.to(tl.int32)
    moved = tl.where(is_fold & (committed > 0), history_len, 0)
    length = tl.where(is_fold, 0, history_len) + committed

    tl.store(ring_start_ptr + block, (ring_start + moved) & (RING - 1), mask=is_live)
    tl.store(history_len_ptr + block, length, mask=is_live)
    tl.store(is_fold_ptr + block, (length > most_unmarked).to(tl.int8), mask=is_live)


@triton.jit(do_not_specialize=["num_requests"])
def reset_blocks_kernel(
    # in-out: cursors and marks [S]
    ring_start_ptr,
    history_len_ptr,
    is_fold_ptr,
    # inputs [B], and how far apart they are; blocks up to `padding` are none
    blocks_ptr,
    is_reset_ptr,
    block_stride,
    reset_stride,
    padding,
    num_requests,
    most_unmarked,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = request < num_requests

    block = tl.load(blocks_ptr + request * block_stride, mask=mask, other=-1).to(tl.int64)
    is_reset = tl.load(is_reset_ptr + request * reset_stride, mask=mask, other=0) != 0
    is_reset = mask & is_reset & (block > padding)
    zeros = tl.zeros([BLOCK], tl.int32)

    tl.store(ring_start_ptr + block, zeros, mask=is_reset)
    tl.store(history_len_ptr + block, zeros, mask=is_reset)
    tl.store(is_fold_ptr + block, (zeros > most_unmarked).to(tl.int8), mask=is_reset)
