"""Triton kernel that stores a step's keys and values and describes its rows."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["append_kernel"]


@triton.jit(do_not_specialize=["num_requests", "page_size"])
def append_kernel(
    # inputs: k, v [N, Hkv, D]
    k_ptr,
    v_ptr,
    # in-out: k_pages, v_pages [P, page_size, Hkv, D]
    k_pages_ptr,
    v_pages_ptr,
    # outputs: kv_len [B]; first_page [B]; is_dead [N]
    kv_len_ptr,
    first_page_ptr,
    is_dead_ptr,
    # metadata: page_table [S, max_pages]; seq_len [S]; cu_seqlens [B + 1]; slots [B]
    page_table_ptr,
    seq_len_ptr,
    cu_seqlens_ptr,
    slots_ptr,
    num_requests,
    page_size,
    k_stride_n,
    k_stride_h,
    v_stride_n,
    v_stride_h,
    k_pages_stride_p,
    k_pages_stride_j,
    k_pages_stride_h,
    v_pages_stride_p,
    v_pages_stride_j,
    v_pages_stride_h,
    page_table_stride_s,
    page_table_stride_p,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """One program per row and head; the first one describes the requests."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    requests = tl.arange(0, REQUESTS)
    is_request = requests < num_requests
    begins = tl.load(cu_seqlens_ptr + requests, mask=is_request, other=0).to(tl.int64)
    ends = tl.load(cu_seqlens_ptr + 1 + requests, mask=is_request, other=0).to(tl.int64)
    slots = tl.load(slots_ptr + requests, mask=is_request, other=-1).to(tl.int64)

    if (row == 0) & (head == 0):
        is_live = (slots >= 0) & (ends > begins)
        length = tl.load(seq_len_ptr + slots, mask=is_live, other=0).to(tl.int64) + ends - begins
        first = tl.load(page_table_ptr + slots * page_table_stride_s, mask=is_live, other=0)
        tl.store(kv_len_ptr + requests, tl.where(is_live, length, 0).to(tl.int32), mask=is_request)
        tl.store(first_page_ptr + requests, first.to(tl.int32), mask=is_request)

    is_mine = (begins <= row) & (row < ends)
    slot = tl.max(tl.where(is_mine, slots, -1), axis=0)
    begin = tl.max(tl.where(is_mine, begins, 0), axis=0)
    if head == 0:
        tl.store(is_dead_ptr + row, slot < 0)
    if slot < 0:
        return

    position = tl.load(seq_len_ptr + slot).to(tl.int64) + row - begin
    page_ptr = page_table_ptr + slot * page_table_stride_s
    page = tl.load(page_ptr + position // page_size * page_table_stride_p).to(tl.int64)
    place = position % page_size
    d_offs = tl.arange(0, BLOCK_D)
    d_mask = d_offs < D
    k = tl.load(k_ptr + row * k_stride_n + head * k_stride_h + d_offs, mask=d_mask, other=0.0)
    v = tl.load(v_ptr + row * v_stride_n + head * v_stride_h + d_offs, mask=d_mask, other=0.0)

    k_pages_ptr += page * k_pages_stride_p + place * k_pages_stride_j + head * k_pages_stride_h
    v_pages_ptr += page * v_pages_stride_p + place * v_pages_stride_j + head * v_pages_stride_h
    tl.store(k_pages_ptr + d_offs, k.to(k_pages_ptr.dtype.element_ty), mask=d_mask)
    tl.store(v_pages_ptr + d_offs, v.to(v_pages_ptr.dtype.element_ty), mask=d_mask)
