"""Triton kernel of attention of prompt rows over pages that hold their keys already.

Key blocks are added up from position 0 on, and a block that a row does not see changes no bit of
its sums, so what a row gets does not depend on the chunk or the tile that it comes in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.paged_attention.triton_verify import _load_columns, _load_pages

__all__ = ["prefill_kernel"]


@triton.jit(do_not_specialize=["num_rows", "num_requests", "num_tiles", "page_table_stride_s"])
def prefill_kernel(
    # inputs: q [N, Hq, D]; k_pages, v_pages [P, PAGE_SIZE, Hkv, D]
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    # output [N, Hq, D]
    out_ptr,
    # metadata: page_table [S, max_pages]; seq_len [S]; cu_seqlens [B + 1]; slots [B]
    page_table_ptr,
    seq_len_ptr,
    cu_seqlens_ptr,
    slots_ptr,
    num_rows,
    num_requests,
    num_tiles,
    scale_log2,
    q_stride_n,
    q_stride_h,
    pages_stride_p,
    pages_stride_j,
    pages_stride_h,
    out_stride_n,
    out_stride_h,
    page_table_stride_s,
    page_table_stride_p,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per tile of a request's rows and query head; those with most keys come first."""
    CHUNKS: tl.constexpr = D // COLUMNS
    columns = tl.arange(0, COLUMNS)
    pid = tl.program_id(0)
    head = (pid % (HEADS * GROUP)).to(tl.int64)
    request = pid // (HEADS * GROUP) % num_requests
    tile = num_tiles - 1 - pid // (HEADS * GROUP) // num_requests
    first = tl.load(cu_seqlens_ptr + request).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + request + 1) - first).to(tl.int32)
    rows_end = tl.load(cu_seqlens_ptr + num_requests).to(tl.int32)
    slot = tl.load(slots_ptr + request).to(tl.int64)

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_mask = rows < length
    out_ptr += head * out_stride_h
    out_rows = out_ptr + (first + rows) * out_stride_n
    zeros = tl.zeros([COLUMNS], out_ptr.dtype.element_ty)
    for row in range(rows_end + tile * num_requests + request, num_rows, num_requests * num_tiles):
        for c in tl.static_range(CHUNKS):
            nobody = out_ptr + row * tl.cast(out_stride_n, tl.int64) + c * COLUMNS + columns
            tl.store(nobody, zeros)
    if slot < 0:
        for c in tl.static_range(CHUNKS):
            ptrs = out_rows[:, None] + (c * COLUMNS + columns)[None, :]
            nothing = tl.zeros([BLOCK_M, COLUMNS], out_ptr.dtype.element_ty)
            tl.store(ptrs, nothing, mask=m_mask[:, None])
        return
    if tile * BLOCK_M >= length:
        return

    position = tl.load(seq_len_ptr + slot).to(tl.int32)
    q_rows = q_ptr + (first + rows) * q_stride_n + head * q_stride_h
    q = _load_columns(q_rows, m_mask, COLUMNS, CHUNKS)
    k_pages_ptr += head // GROUP * pages_stride_h
    v_pages_ptr += head // GROUP * pages_stride_h
    table_ptr = page_table_ptr + slot * page_table_stride_s
    num_keys = position + tl.minimum((tile + 1) * BLOCK_M, length)
    num_blocks = tl.cdiv(num_keys, BLOCK_N)
    # Blocks that every row of the tile sees whole come first, without a mask.
    num_whole = (position + tile * BLOCK_M + 1) // BLOCK_N
    page_numbers = _load_pages(table_ptr, page_table_stride_p, 0, num_keys, PAGE_SIZE, BLOCK_N)
    page_places = page_numbers * tl.cast(pages_stride_p, tl.int64)
    page_numbers = _load_pages(table_ptr, page_table_stride_p, 1, num_keys, PAGE_SIZE, BLOCK_N)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = ()
    for _c in tl.static_range(CHUNKS):
        acc = acc + (tl.zeros([BLOCK_M, COLUMNS], tl.float32),)
    for phase in tl.static_range(2):
        begin = num_whole if phase else 0
        end = num_blocks if phase else num_whole
        for i in tl.range(begin, end, num_stages=STAGES):
            keys = i * BLOCK_N + tl.arange(0, BLOCK_N)
            places = (keys.to(tl.uint32) % PAGE_SIZE) * tl.cast(pages_stride_j, tl.int64)
            places += page_places
            k_rows = tl.multiple_of(k_pages_ptr + places, ALIGNMENT)
            v_rows = tl.multiple_of(v_pages_ptr + places, ALIGNMENT)
            k = _load_columns(k_rows, keys < num_keys, COLUMNS, CHUNKS)
            v = _load_columns(v_rows, keys < num_keys, COLUMNS, CHUNKS)
            # Numbers arrive two blocks before their keys are copied, so that no copy waits.
            page_places = page_numbers * tl.cast(pages_stride_p, tl.int64)
            page_numbers = _load_pages(
                table_ptr, page_table_stride_p, i + 2, num_keys, PAGE_SIZE, BLOCK_N
            )

            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for c in tl.static_range(CHUNKS):
                scores = tl.dot(q[c], tl.trans(k[c]), scores, input_precision="ieee")
            if phase:
                is_seen = keys[None, :] <= position + rows[:, None]
                scores = tl.where(is_seen, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
            weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
            decay = tl.exp2(peak - new_peak)
            total = total * decay + tl.sum(weights, 1)
            weights = weights.to(v_pages_ptr.dtype.element_ty)
            new_acc = ()
            for c in tl.static_range(CHUNKS):
                kept = acc[c] * decay[:, None]
                new_acc = new_acc + (tl.dot(weights, v[c], kept, input_precision="ieee"),)
            acc = new_acc
            peak = new_peak

    for c in tl.static_range(CHUNKS):
        ptrs = out_rows[:, None] + (c * COLUMNS + columns)[None, :]
        y = (acc[c] / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(ptrs, y, mask=m_mask[:, None])
