"""Building: from row offsets to the parameters of every request and row.

Each address has one writer: a request's lanes write its own rows, and rows past the last request's
belong to the lanes that number them. So no kernel writes defaults first and results afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.ring.triton_fold_rule import is_fold_due
from hybridspec.ops.verify_plan.triton_select import select_in_block

__all__ = ["build_kernel", "plan_kernel"]


@triton.jit
def load_requests(slots_ptr, seq_len_ptr, history_len_ptr, ring_start_ptr, b_offs, b_mask):
    """Slot of each request (-1 past the batch), tokens stored in it and its live ring rows.

    Last the first of these rows, -1 where the caller does not say.
    """
    slot = tl.load(slots_ptr + b_offs, mask=b_mask, other=-1)
    is_live = slot >= 0
    stored = tl.load(seq_len_ptr + slot.to(tl.int64), mask=is_live, other=0)
    history = tl.load(history_len_ptr + slot.to(tl.int64), mask=is_live, other=0)
    ring_start = tl.full(slot.shape, -1, tl.int32)
    if ring_start_ptr is not None:
        ring_start = tl.load(ring_start_ptr + slot.to(tl.int64), mask=is_live, other=0)
    return slot, stored, history, ring_start


@triton.jit
def load_tokens(
    tokens_ptr, tokens_stride, b_offs, b_mask, TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr
):
    """Candidate tokens of a block of requests, [BLOCK, BLOCK_TOKENS]."""
    j_offs = tl.arange(0, BLOCK_TOKENS)[None, :]
    token_ptr = tokens_ptr + b_offs.to(tl.int64)[:, None] * tokens_stride + j_offs
    return tl.load(token_ptr, mask=b_mask[:, None] & (j_offs < TOKENS), other=0)


@triton.jit
def write_batch(
    num_verify_tokens_ptr, kv_len_ptr, out_slots_ptr, is_fold_ptr,
    out_tokens_ptr, positions_ptr, sources_ptr,
    b_offs, start, length, slot, stored, history, ring_start, token,
    out_requests, row_capacity, max_window,
    TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Write a block of requests and their rows; neighbouring lanes hold neighbouring rows."""
    num_tokens = tl.where(slot >= 0, length, 0)
    kv_len = tl.where(num_tokens > 0, stored + num_tokens, 0)
    is_fold = is_fold_due(slot, ring_start, history, num_tokens, max_window)
    out_mask = b_offs < out_requests
    tl.store(num_verify_tokens_ptr + b_offs, num_tokens, mask=out_mask)
    tl.store(kv_len_ptr + b_offs, kv_len, mask=out_mask)
    tl.store(out_slots_ptr + b_offs, slot, mask=out_mask)
    tl.store(is_fold_ptr + b_offs, is_fold.to(tl.int8), mask=out_mask)

    j_offs = tl.arange(0, BLOCK_TOKENS)[None, :]
    row = start[:, None] + j_offs
    row_mask = (j_offs < length[:, None]) & (j_offs < TOKENS) & (row < row_capacity)
    is_owned = slot[:, None] >= 0
    position = tl.where(is_owned, stored[:, None] + j_offs, 0).to(tl.int64)
    source = tl.where(is_owned, b_offs[:, None] * TOKENS + j_offs, -1)
    tl.store(out_tokens_ptr + row, tl.where(is_owned, token, 0), mask=row_mask)
    tl.store(positions_ptr + row, position, mask=row_mask)
    tl.store(sources_ptr + row, source, mask=row_mask)


@triton.jit
def write_hold_rows(out_tokens_ptr, positions_ptr, sources_ptr, row, row_mask):
    tl.store(out_tokens_ptr + row, tl.zeros(row.shape, tl.int64), mask=row_mask)
    tl.store(positions_ptr + row, tl.zeros(row.shape, tl.int64), mask=row_mask)
    tl.store(sources_ptr + row, tl.full(row.shape, -1, tl.int32), mask=row_mask)


@triton.jit(do_not_specialize=["num_requests", "out_requests", "row_capacity", "max_window"])
def build_kernel(
    # inputs: cu_seqlens [C + 1]; tokens [B, TOKENS]; slots [B]; seq_len, history_len, ring_start
    # [S], the last or None
    cu_seqlens_ptr, tokens_ptr, slots_ptr, seq_len_ptr, history_len_ptr, ring_start_ptr,
    # outputs [C], C >= B
    num_verify_tokens_ptr, kv_len_ptr, out_slots_ptr, is_fold_ptr,
    # outputs [N]
    out_tokens_ptr, positions_ptr, sources_ptr,
    # scalars and strides
    num_requests, out_requests, row_capacity, max_window, tokens_stride,
    # sizes
    TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    b_offs = pid * BLOCK + tl.arange(0, BLOCK)
    b_mask = b_offs < num_requests

    start = tl.load(cu_seqlens_ptr + b_offs, mask=b_mask, other=0)
    length = tl.load(cu_seqlens_ptr + b_offs + 1, mask=b_mask, other=0) - start
    token = load_tokens(tokens_ptr, tokens_stride, b_offs, b_mask, TOKENS, BLOCK_TOKENS)
    slot, stored, history, ring_start = load_requests(
        slots_ptr, seq_len_ptr, history_len_ptr, ring_start_ptr, b_offs, b_mask
    )

    write_batch(
        num_verify_tokens_ptr, kv_len_ptr, out_slots_ptr, is_fold_ptr, out_tokens_ptr,
        positions_ptr, sources_ptr, b_offs, start, length, slot, stored, history, ring_start, token,
        out_requests, row_capacity, max_window, TOKENS, BLOCK_TOKENS,
    )  # fmt: skip
    total = tl.load(cu_seqlens_ptr + num_requests)
    row = pid * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = (row >= total) & (row < row_capacity)
    write_hold_rows(out_tokens_ptr, positions_ptr, sources_ptr, row, row_mask)


@triton.jit(
    do_not_specialize=["num_requests", "out_requests", "num_rows", "row_capacity", "max_window"]
)
def plan_kernel(
    # inputs: confidences [B, k]; tokens [B, k + 1]; slots, num_drafts [B]; seq_len, history_len,
    # ring_start [S], the last or None; table [k, TABLE_BINS]
    confidences_ptr, tokens_ptr, slots_ptr, seq_len_ptr, history_len_ptr, ring_start_ptr,
    num_drafts_ptr, table_ptr,
    # outputs [C + 1] and [C], C >= B
    cu_seqlens_ptr, num_verify_tokens_ptr, kv_len_ptr, out_slots_ptr, is_fold_ptr,
    # outputs [N]
    out_tokens_ptr, positions_ptr, sources_ptr,
    # scalars and strides
    num_requests, out_requests, num_rows, row_capacity, max_window, confidences_stride,
    tokens_stride,
    # sizes and switches
    NUM_DRAFTS: tl.constexpr, TABLE_BINS: tl.constexpr, HAS_NUM_DRAFTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    b_offs = tl.arange(0, BLOCK)
    b_mask = b_offs < num_requests
    # Loaded before the search, which hides the latency of two dependent loads.
    slot, stored, history, ring_start = load_requests(
        slots_ptr, seq_len_ptr, history_len_ptr, ring_start_ptr, b_offs, b_mask
    )
    token = load_tokens(tokens_ptr, tokens_stride, b_offs, b_mask, NUM_DRAFTS + 1, BLOCK_TOKENS)

    start, length, total = select_in_block(
        confidences_ptr, confidences_stride, num_drafts_ptr, table_ptr, b_offs, b_mask, slot >= 0,
        num_rows, NUM_DRAFTS, TABLE_BINS, HAS_NUM_DRAFTS,
    )  # fmt: skip

    tl.store(cu_seqlens_ptr, 0)
    tl.store(cu_seqlens_ptr + 1 + b_offs, start + length, mask=b_offs < out_requests)
    write_batch(
        num_verify_tokens_ptr, kv_len_ptr, out_slots_ptr, is_fold_ptr, out_tokens_ptr,
        positions_ptr, sources_ptr, b_offs, start, length, slot, stored, history, ring_start, token,
        out_requests, row_capacity, max_window, NUM_DRAFTS + 1, BLOCK_TOKENS,
    )  # fmt: skip
    for first in range(total // BLOCK_ROWS * BLOCK_ROWS, row_capacity, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        row_mask = (row >= total) & (row < row_capacity)
        write_hold_rows(out_tokens_ptr, positions_ptr, sources_ptr, row, row_mask)
