"""Gathers of selected rows, compaction of request groups, and copies of page tables."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "compact_groups_kernel",
    "copy_page_table_kernel",
    "count_groups_kernel",
    "gather_rows_kernel",
    "gather_sampling_kernel",
]


@triton.jit(do_not_specialize=["width"])
def gather_rows_kernel(
    # inputs: hidden [M, D]; sources [N]
    hidden_ptr, sources_ptr,
    # output [N, D]
    out_ptr,
    # scalars and strides
    width, hidden_stride, out_stride,
    # sizes
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources_ptr + row).to(tl.int64)
    num_loaded = tl.where(source >= 0, width, 0)
    value = tl.load(hidden_ptr + source * hidden_stride + offs, mask=offs < num_loaded, other=0)
    tl.store(out_ptr + row * out_stride + offs, value, mask=offs < width)


@triton.jit(do_not_specialize=["num_rows", "rows_per_request"])
def gather_sampling_kernel(
    # inputs [B]
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr,
    # input [N]
    sources_ptr,
    # outputs [N]
    out_temperature_ptr, out_top_k_ptr, out_top_p_ptr, out_min_p_ptr, out_seeds_ptr,
    # scalars
    num_rows, rows_per_request,
    # sizes
    BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_rows
    source = tl.load(sources_ptr + offs, mask=mask, other=-1)
    is_owned = source >= 0
    request = tl.where(is_owned, source, 0) // rows_per_request

    temperature = tl.load(temperature_ptr + request, mask=is_owned, other=0.0)
    top_k = tl.load(top_k_ptr + request, mask=is_owned, other=0)
    top_p = tl.load(top_p_ptr + request, mask=is_owned, other=1.0)
    min_p = tl.load(min_p_ptr + request, mask=is_owned, other=0.0)
    seeds = tl.load(seeds_ptr + request, mask=is_owned, other=0)

    tl.store(out_temperature_ptr + offs, temperature, mask=mask)
    tl.store(out_top_k_ptr + offs, top_k, mask=mask)
    tl.store(out_top_p_ptr + offs, top_p, mask=mask)
    tl.store(out_min_p_ptr + offs, min_p, mask=mask)
    tl.store(out_seeds_ptr + offs, seeds, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def count_groups_kernel(marks_ptr, block_counts_ptr, num_rows, BLOCK: tl.constexpr):
    """block_counts [blocks] <- group ends among the block's marks [n]."""
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mark = tl.load(marks_ptr + offs, mask=offs < num_rows, other=0)
    tl.store(block_counts_ptr + pid, tl.sum((mark > 0).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "capacity", "hold_request"])
def compact_groups_kernel(
    # inputs [n]; block_counts [blocks]
    requests_ptr, seq_len_ptr, marks_ptr, block_counts_ptr,
    # outputs [capacity]
    q_len_ptr, out_seq_len_ptr, out_requests_ptr,
    # scalars
    num_rows, num_blocks, capacity, hold_request,
    # switch and sizes
    IS_ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, MOST_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Entry i <- the i-th group end; entries past the last group are hold entries."""
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_rows
    mark = tl.load(marks_ptr + offs, mask=mask, other=0).to(tl.int32)
    is_end = mark > 0
    ends = is_end.to(tl.int32)
    if IS_ONE_BLOCK:
        groups_before = 0
        num_groups = tl.sum(ends, axis=0)
    else:
        block = tl.arange(0, MOST_BLOCKS)
        counts = tl.load(block_counts_ptr + block, mask=block < num_blocks, other=0)
        groups_before = tl.sum(tl.where(block < pid, counts, 0), axis=0)
        num_groups = tl.sum(counts, axis=0)

    entry = groups_before + tl.cumsum(ends, 0) - ends
    entry_mask = is_end & (entry < capacity)
    length = tl.load(seq_len_ptr + offs, mask=entry_mask, other=0).to(tl.int32)
    request = tl.load(requests_ptr + offs, mask=entry_mask, other=0).to(tl.int32)
    tl.store(q_len_ptr + entry, mark, mask=entry_mask)
    tl.store(out_seq_len_ptr + entry, length, mask=entry_mask)
    tl.store(out_requests_ptr + entry, request, mask=entry_mask)

    # Entries from the number of groups on: no group writes them.
    is_hold = (offs >= num_groups) & (offs < capacity)
    zeros = tl.zeros(offs.shape, tl.int32)
    tl.store(q_len_ptr + offs, zeros, mask=is_hold)
    tl.store(out_seq_len_ptr + offs, zeros, mask=is_hold)
    tl.store(out_requests_ptr + offs, zeros + hold_request, mask=is_hold)


@triton.jit(do_not_specialize=["width"])
def copy_page_table_kernel(
    # inputs: source [S, >= width]; requests [B]
    source_ptr, requests_ptr,
    # output [B, width]
    out_ptr,
    # scalars and strides
    width, source_stride, source_stride_page, out_stride, out_stride_page,
    # sizes
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = offs < width
    request = tl.load(requests_ptr + row).to(tl.int64)
    source = source_ptr + request * source_stride + offs * source_stride_page
    value = tl.load(source, mask=mask, other=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + offs * out_stride_page, value, mask=mask)
