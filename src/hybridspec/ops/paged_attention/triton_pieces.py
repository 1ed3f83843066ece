"""Triton kernels of attention over pages whose sums have one order, whatever the load.

The keys of a request are cut into pieces that begin at fixed positions. A program adds up one piece
for a tile of rows, block after block; `join_kernel` adds the pieces of a row in their order.
Blocks and pieces behind a row's position change no bit of its sums. The rows are in the pages
already when this runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.paged_attention.triton_verify import (
    _add_block,
    _load_columns,
    _load_pages,
    _store_columns,
)

__all__ = ["join_kernel", "piece_kernel"]


@triton.jit
def piece_start(number, PIECE: tl.constexpr):
    """First position of a piece: PIECE apart, and twice as far after every doubling beyond 16."""
    doublings = tl.maximum(number // 8 - 1, 0)
    return (number - 8 * doublings) * (PIECE << doublings)


@triton.jit(do_not_specialize=["num_requests", "num_rows", "page_table_stride_s"])
def piece_kernel(
    # inputs: q [N, Hq, D]; k_pages, v_pages [P, PAGE_SIZE, Hkv, D]
    q_ptr, k_pages_ptr, v_pages_ptr,
    # outputs: of each piece and row: parts [pieces, N, Hq, D], sums [pieces, N, Hq, 2], fp32
    # (peak, total)
    parts_ptr, sums_ptr,
    # metadata: page_table [S, max_pages]; seq_len [S]; cu_seqlens [B + 1]; slots [B]
    page_table_ptr, seq_len_ptr, cu_seqlens_ptr, slots_ptr, num_requests, num_rows, scale_log2,
    q_strides, pages_strides, page_table_stride_s, page_table_stride_p,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ALIGNMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Attend over one piece: programs are (request, key head), tile of rows, number of the piece.

    GROUP query heads read a key head.
    """
    tl.static_assert(PIECE % BLOCK_N == 0)
    head, request = (tl.program_id(0) % HEADS).to(tl.int64), tl.program_id(0) // HEADS
    number = tl.program_id(2)
    first = tl.load(cu_seqlens_ptr + request).to(tl.int64)
    num_tokens = (tl.load(cu_seqlens_ptr + request + 1) - first).to(tl.int32)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    m_offs = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = m_offs // GROUP
    if (slot < 0) | (tl.program_id(1) * BLOCK_M >= num_tokens * GROUP):
        return
    position = tl.load(seq_len_ptr + slot).to(tl.int32)
    num_keys = position + num_tokens
    begin = piece_start(number, PIECE)
    if begin >= num_keys:
        return

    CHUNKS: tl.constexpr = D // COLUMNS
    m_mask = tokens < num_tokens
    heads = head * GROUP + m_offs % GROUP
    q_rows = q_ptr + (first + tokens) * q_strides[0] + heads * q_strides[1]
    q = _load_columns(q_rows, m_mask, COLUMNS, CHUNKS)
    k_pages_ptr += head * pages_strides[2]
    v_pages_ptr += head * pages_strides[2]
    table_ptr = page_table_ptr + slot * page_table_stride_s
    block = begin // BLOCK_N
    end_block = tl.cdiv(tl.minimum(piece_start(number + 1, PIECE), num_keys), BLOCK_N)
    pages = _load_pages(table_ptr, page_table_stride_p, block, num_keys, PAGE_SIZE, BLOCK_N)
    page_places = pages * tl.cast(pages_strides[0], tl.int64)
    pages = _load_pages(table_ptr, page_table_stride_p, block + 1, num_keys, PAGE_SIZE, BLOCK_N)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = ()
    for _c in tl.static_range(CHUNKS):
        acc = acc + (tl.zeros([BLOCK_M, COLUMNS], tl.float32),)
    for i in tl.range(block, end_block, num_stages=STAGES):
        keys = i * BLOCK_N + tl.arange(0, BLOCK_N)
        places = (keys.to(tl.uint32) % PAGE_SIZE) * tl.cast(pages_strides[1], tl.int64)
        places += page_places
        k_rows = tl.multiple_of(k_pages_ptr + places, ALIGNMENT)
        v_rows = tl.multiple_of(v_pages_ptr + places, ALIGNMENT)
        k = _load_columns(k_rows, keys < num_keys, COLUMNS, CHUNKS)
        v = _load_columns(v_rows, keys < num_keys, COLUMNS, CHUNKS)
        # Numbers arrive two blocks before their keys are copied, so that no copy waits.
        page_places = pages * tl.cast(pages_strides[0], tl.int64)
        pages = _load_pages(table_ptr, page_table_stride_p, i + 2, num_keys, PAGE_SIZE, BLOCK_N)
        acc, peak, total = _add_block(
            acc, peak, total, q, k, v, keys, position + tokens, (i + 1) * BLOCK_N > position,
            scale_log2,
        )  # fmt: skip

    rows = (number * num_rows + first + tokens) * (HEADS * GROUP) + heads
    _store_columns(parts_ptr + rows * D, acc, m_mask, COLUMNS)
    tl.store(sums_ptr + rows * 2, peak, mask=m_mask)
    tl.store(sums_ptr + rows * 2 + 1, total, mask=m_mask)


@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def join_kernel(
    # inputs: parts, sums as above
    parts_ptr, sums_ptr,
    # output: out [N, Hq, D]
    out_ptr,
    # metadata: seq_len [S]; cu_seqlens [B + 1]; slots [B]
    seq_len_ptr, cu_seqlens_ptr, slots_ptr, num_requests, num_rows, out_strides,
    QUERY_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Add the pieces of a row in order; programs are (request, query head), row of the request."""
    head, request = (tl.program_id(0) % QUERY_HEADS).to(tl.int64), tl.program_id(0) // QUERY_HEADS
    token, most_tokens = tl.program_id(1), tl.num_programs(1)
    d_offs = tl.arange(0, BLOCK_D)
    d_mask = d_offs < D
    first = tl.load(cu_seqlens_ptr + request).to(tl.int64)
    num_tokens = (tl.load(cu_seqlens_ptr + request + 1) - first).to(tl.int32)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    out_ptr += head * out_strides[1]
    rows_end = tl.load(cu_seqlens_ptr + num_requests).to(tl.int32)
    zeros = tl.zeros([BLOCK_D], out_ptr.dtype.element_ty)
    for row in range(
        rows_end + request * most_tokens + token, num_rows, num_requests * most_tokens
    ):
        tl.store(out_ptr + row * tl.cast(out_strides[0], tl.int64) + d_offs, zeros, mask=d_mask)
    if token >= num_tokens:
        return
    row = first + token
    out_row = out_ptr + row * out_strides[0] + d_offs
    if slot < 0:
        tl.store(out_row, zeros, mask=d_mask)
        return

    last_key = tl.load(seq_len_ptr + slot).to(tl.int32) + token
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    number = 0
    while piece_start(number, PIECE) <= last_key:
        place = (tl.cast(number, tl.int64) * num_rows + row) * QUERY_HEADS + head
        part_peak = tl.load(sums_ptr + place * 2)
        part_total = tl.load(sums_ptr + place * 2 + 1)
        part = tl.load(parts_ptr + place * D + d_offs, mask=d_mask, other=0.0)
        new_peak = tl.maximum(peak, part_peak)
        decay, weight = tl.exp2(peak - new_peak), tl.exp2(part_peak - new_peak)
        total = total * decay + part_total * weight
        acc = acc * decay + part * weight
        peak = new_peak
        number += 1
    tl.store(out_row, (acc / total).to(out_ptr.dtype.element_ty), mask=d_mask)
