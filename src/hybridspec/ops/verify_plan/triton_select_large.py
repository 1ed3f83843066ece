"""Row selection over many blocks: three histograms of ten bits, then count, scan and compact.

Each launch reads what earlier launches wrote and nothing that its own programs write, except for
integer atomics into cleared counters, whose sums do not depend on the order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.verify_plan.triton_select import lengths_from_ties, survival_step

__all__ = ["count_kernel", "offsets_kernel", "refine_kernel", "score_kernel"]

NUM_BINS_LOG2 = tl.constexpr(10)
NUM_BINS = tl.constexpr(1024)


@triton.jit
def add_to_histogram(histogram_ptr, digit, mask):
    bins = tl.arange(0, NUM_BINS)
    counts = tl.histogram(tl.where(mask, digit, 0), NUM_BINS, mask=mask)
    tl.atomic_add(histogram_ptr + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def pick_bin(histogram_ptr, wanted):
    """The largest bin that, with all above it, has `wanted` keys (0 if none has), and how many of
    its own keys are wanted."""
    bins = tl.arange(0, NUM_BINS)
    counts = tl.load(histogram_ptr + (NUM_BINS - 1) - bins)
    reached = tl.cumsum(counts, 0)
    index = tl.sum((reached < wanted).to(tl.int32), axis=0)
    index = tl.minimum(index, NUM_BINS - 1)
    larger = tl.sum(tl.where(bins < index, counts, 0), axis=0)
    return NUM_BINS - 1 - index, wanted - larger


@triton.jit(do_not_specialize=["num_requests"])
def score_kernel(
    # inputs: confidences [B, k]; slots, num_drafts [B]; table [k, TABLE_BINS]
    confidences_ptr, slots_ptr, num_drafts_ptr, table_ptr,
    # outputs: keys [B, k]; histogram [NUM_BINS] and number of live requests, both cleared before
    keys_ptr, histogram_ptr, live_ptr,
    # scalars and strides
    num_requests, confidences_stride,
    # sizes and switches
    NUM_DRAFTS: tl.constexpr, TABLE_BINS: tl.constexpr, HAS_NUM_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_requests * NUM_DRAFTS
    request = offs // NUM_DRAFTS
    draft = offs % NUM_DRAFTS
    is_live = tl.load(slots_ptr + request, mask=mask, other=-1) >= 0
    limit = tl.full(offs.shape, NUM_DRAFTS, tl.int32)
    if HAS_NUM_DRAFTS:
        limit = tl.load(num_drafts_ptr + request, mask=mask, other=0)

    # Every lane multiplies up to its own draft, in the same order as the other backends.
    survival = tl.full(offs.shape, 1.0, tl.float32)
    row_ptr = confidences_ptr + request.to(tl.int64) * confidences_stride
    for j in tl.static_range(NUM_DRAFTS):
        is_before = mask & (j <= draft)
        confidence = tl.load(row_ptr + j, mask=is_before, other=0.0).to(tl.float32)
        next_survival = survival_step(survival, confidence, table_ptr, j, is_before, TABLE_BINS)
        survival = tl.where(is_before, next_survival, survival)
    is_draft = is_live & (draft < limit)
    key = tl.where(is_draft, survival.to(tl.int32, bitcast=True), -1)

    tl.store(keys_ptr + offs, key, mask=mask)
    add_to_histogram(histogram_ptr, key >> (2 * NUM_BINS_LOG2), is_draft)
    num_live = tl.sum((is_live & (draft == 0)).to(tl.int32), axis=0)
    tl.atomic_add(live_ptr, num_live, sem="relaxed")


@triton.jit(do_not_specialize=["num_keys", "num_rows"])
def refine_kernel(
    # inputs: keys [num_keys]; the histogram of the digit above; number of live requests
    keys_ptr, previous_histogram_ptr, live_ptr,
    # in-out: search [4, 2], read at PASS - 1 and written at PASS; histogram [NUM_BINS], cleared
    search_ptr, histogram_ptr,
    # scalars
    num_keys, num_rows,
    # sizes
    PASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    shift: tl.constexpr = (2 - PASS) * NUM_BINS_LOG2
    if PASS == 1:
        prefix = num_rows * 0
        wanted = num_rows - tl.load(live_ptr)
    else:
        prefix = tl.load(search_ptr + 2 * (PASS - 1))
        wanted = tl.load(search_ptr + 2 * (PASS - 1) + 1)
    digit, wanted = pick_bin(previous_histogram_ptr, wanted)
    prefix = (prefix << NUM_BINS_LOG2) + digit

    offs = pid * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + offs, mask=offs < num_keys, other=-1)
    is_in = (key >> (shift + NUM_BINS_LOG2)) == prefix

    add_to_histogram(histogram_ptr, (key >> shift) & (NUM_BINS - 1), is_in)
    if pid == 0:
        tl.store(search_ptr + 2 * PASS, prefix)
        tl.store(search_ptr + 2 * PASS + 1, wanted)


@triton.jit
def rows_and_ties(slots_ptr, keys_ptr, threshold, b_offs, b_mask, NUM_DRAFTS: tl.constexpr):
    """Rows of each request that are in anyway, and its drafts at the threshold."""
    rows = (tl.load(slots_ptr + b_offs, mask=b_mask, other=-1) >= 0).to(tl.int32)
    ties = rows * 0
    for j in tl.static_range(NUM_DRAFTS):
        key = tl.load(keys_ptr + b_offs * NUM_DRAFTS + j, mask=b_mask, other=-1)
        rows += (key > threshold).to(tl.int32)
        ties += (key == threshold).to(tl.int32)
    return rows, ties


@triton.jit(do_not_specialize=["num_requests"])
def count_kernel(
    # inputs: slots [B]; keys [B, k]; the histogram of the last digit
    slots_ptr, keys_ptr, histogram_ptr,
    # in-out: search [4, 2], read at 2 and written at 3; output: block_sums [blocks, 2]
    search_ptr, block_sums_ptr,
    # scalars
    num_requests,
    # sizes
    NUM_DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    threshold = tl.full((), 0, tl.int32)
    if NUM_DRAFTS > 0:
        prefix = tl.load(search_ptr + 4)
        digit, tie_budget = pick_bin(histogram_ptr, tl.load(search_ptr + 5))
        threshold = (prefix << NUM_BINS_LOG2) + digit
        if pid == 0:
            tl.store(search_ptr + 6, threshold)
            tl.store(search_ptr + 7, tie_budget)

    b_offs = pid * BLOCK + tl.arange(0, BLOCK)
    b_mask = b_offs < num_requests
    rows, ties = rows_and_ties(slots_ptr, keys_ptr, threshold, b_offs, b_mask, NUM_DRAFTS)
    tl.store(block_sums_ptr + 2 * pid, tl.sum(rows, axis=0))
    tl.store(block_sums_ptr + 2 * pid + 1, tl.sum(ties, axis=0))


@triton.jit(do_not_specialize=["num_requests", "out_requests", "num_blocks"])
def offsets_kernel(
    # inputs: slots [B]; keys [B, k]; search [4, 2]; block_sums [blocks, 2]
    slots_ptr, keys_ptr, search_ptr, block_sums_ptr,
    # output [C + 1], C >= B
    cu_seqlens_ptr,
    # scalars
    num_requests, out_requests, num_blocks,
    # sizes
    NUM_DRAFTS: tl.constexpr, BLOCK: tl.constexpr, MOST_BLOCKS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    threshold = tl.load(search_ptr + 6)
    tie_budget = tl.load(search_ptr + 7)
    block = tl.arange(0, MOST_BLOCKS)
    is_before = block < tl.minimum(pid, num_blocks)
    rows_before = tl.sum(tl.load(block_sums_ptr + 2 * block, mask=is_before, other=0), axis=0)
    ties_before = tl.sum(tl.load(block_sums_ptr + 2 * block + 1, mask=is_before, other=0), axis=0)

    b_offs = pid * BLOCK + tl.arange(0, BLOCK)
    b_mask = b_offs < num_requests
    rows, ties = rows_and_ties(slots_ptr, keys_ptr, threshold, b_offs, b_mask, NUM_DRAFTS)
    start, length = lengths_from_ties(rows, ties, tie_budget, rows_before, ties_before)

    if pid == 0:
        tl.store(cu_seqlens_ptr, 0)
    tl.store(cu_seqlens_ptr + 1 + b_offs, start + length, mask=b_offs < out_requests)
