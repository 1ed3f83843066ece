"""Row selection within one block: scores in registers, a radix search for the worst chosen one.

Scores lie in 0..1, where the bits of an fp32 number order like the number, so a score's key is its
bit pattern: 30 bits. The search finds the largest threshold that at least the wanted number of keys
reach, three bits at a time from the top, and stops once a whole bin is wanted.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["safe", "select_in_block", "select_kernel", "survival_step"]

# Rows and requests are counted in 16-bit fields of int64: at most 2^15 - 1 drafts a block.
MOST_DRAFTS_IN_BLOCK = 32767


@triton.jit
def safe(value):
    """Value within 0..1; NaN and everything not above 0 is 0."""
    return tl.where(value > 0.0, tl.minimum(value, 1.0), 0.0)


@triton.jit
def survival_step(survival, confidence, table_ptr, j, mask, NUM_BINS: tl.constexpr):
    """Survival of draft j from that of the draft before it; subnormal products are 0."""
    confidence = safe(confidence)
    if NUM_BINS > 0:
        bins = tl.minimum((confidence * NUM_BINS).to(tl.int32), NUM_BINS - 1)
        confidence = safe(tl.load(table_ptr + j * NUM_BINS + bins, mask=mask, other=0.0))
    survival = survival * confidence
    return tl.where(survival < 1.1754943508222875e-38, 0.0, survival)


@triton.jit
def survival_keys(
    confidences_ptr,
    confidences_stride,
    num_drafts_ptr,
    table_ptr,
    b_offs,
    b_mask,
    is_live,
    NUM_DRAFTS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    HAS_NUM_DRAFTS: tl.constexpr,
):
    """One vector of keys per draft; -1 where there is no draft to verify."""
    limit = tl.full(b_offs.shape, NUM_DRAFTS, tl.int32)
    if HAS_NUM_DRAFTS:
        limit = tl.load(num_drafts_ptr + b_offs, mask=b_mask, other=0)
    survival = tl.full(b_offs.shape, 1.0, tl.float32)
    row_ptr = confidences_ptr + b_offs.to(tl.int64) * confidences_stride
    keys = ()
    for j in tl.static_range(NUM_DRAFTS):
        confidence = tl.load(row_ptr + j, mask=b_mask, other=0.0).to(tl.float32)
        survival = survival_step(survival, confidence, table_ptr, j, b_mask, NUM_BINS)
        key = survival.to(tl.int32, bitcast=True)
        keys = keys + (tl.where(is_live & (j < limit), key, -1),)
    return keys


@triton.jit
def spread_bytes(packed):
    """Four bytes of an int32 as four 16-bit fields of an int64."""
    wide = packed.to(tl.int64)
    wide = (wide | (wide << 16)) & 0x0000FFFF0000FFFF
    return (wide | (wide << 8)) & 0x00FF00FF00FF00FF


@triton.jit
def digit_counts(keys, prefix, shift, NUM_DRAFTS: tl.constexpr):
    """How many keys that agree with `prefix` above bit shift + 2 have each value of bits
    shift .. shift + 2: 16-bit fields, even values in the first word and odd ones in the second."""
    base = prefix >> shift
    # Four bits per value are enough for the drafts of one request: there are at most seven.
    nibbles = tl.zeros(keys[0].shape, tl.int32)
    for j in tl.static_range(NUM_DRAFTS):
        digit = (keys[j] >> shift) - base
        is_in = (digit >= 0) & (digit < 8)
        nibbles += tl.where(is_in, 1 << ((digit & 7) * 4), 0)
    # Both words side by side, so that one reduction sums them.
    words = tl.join(spread_bytes(nibbles & 0x0F0F0F0F), spread_bytes((nibbles >> 4) & 0x0F0F0F0F))
    sums = tl.sum(words, axis=0)
    is_odd = tl.arange(0, 2) == 1
    return tl.sum(tl.where(is_odd, 0, sums), axis=0), tl.sum(tl.where(is_odd, sums, 0), axis=0)


@triton.jit
def pick_digit(even, odd, wanted):
    """The largest digit that, with all above it, has `wanted` keys (0 if none has): the digit, its
    count, and how many keys have a larger one."""
    # Keys with this digit or a larger one, which rises as the digit falls; only this sum is serial.
    reached = wanted * 0
    picked = reached
    larger = reached
    at_least = reached + 0x7FFFFFFF
    for digit in tl.static_range(7, -1, -1):
        word = odd if digit % 2 else even
        reached += ((word >> (16 * (digit // 2))) & 0xFFFF).to(tl.int32)
        is_enough = (reached >= wanted) | (digit == 0)
        at_least = tl.minimum(at_least, tl.where(is_enough, reached, 0x7FFFFFFF))
        larger = tl.maximum(larger, tl.where(is_enough, 0, reached))
        if digit > 0:
            picked += is_enough.to(tl.int32)
    return picked, at_least - larger, larger


@triton.jit
def find_threshold(keys, wanted, NUM_DRAFTS: tl.constexpr):
    """Threshold and number of ties such that all keys above it and that many equal ones are the
    `wanted` largest (or all keys, if there are fewer)."""
    prefix = wanted * 0
    shift = prefix + 27
    is_whole = prefix
    while shift >= 0:
        even, odd = digit_counts(keys, prefix, shift, NUM_DRAFTS)
        digit, count, larger = pick_digit(even, odd, wanted)
        prefix += digit << shift
        wanted -= larger
        # The whole bin is wanted: its lower bits do not matter any more.
        is_whole = (wanted >= count).to(tl.int32)
        shift = tl.where(is_whole > 0, -1, shift - 3)
    return prefix - is_whole, tl.where(is_whole > 0, 0, wanted)


@triton.jit
def lengths_from_ties(base, ties, tie_budget, base_before, ties_before):
    """First row and number of rows of each request of a block, given what stands before the block.

    `base` counts the rows that are in anyway, `ties` the drafts at the threshold, of which the
    first `tie_budget` of the batch are in. One scan serves both.
    """
    packed = base.to(tl.int64) + (ties.to(tl.int64) << 32)
    before = tl.cumsum(packed, 0) - packed
    base_before += (before & 0xFFFFFFFF).to(tl.int32)
    ties_before += (before >> 32).to(tl.int32)
    start = base_before + tl.minimum(ties_before, tie_budget)
    taken = tl.minimum(tl.maximum(tie_budget - ties_before, 0), ties)
    return start, base + taken


@triton.jit
def select_in_block(
    confidences_ptr,
    confidences_stride,
    num_drafts_ptr,
    table_ptr,
    b_offs,
    b_mask,
    is_live,
    num_rows,
    NUM_DRAFTS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    HAS_NUM_DRAFTS: tl.constexpr,
):
    """First row and number of rows of every request of a batch that fits one block."""
    rows = is_live.to(tl.int32)
    ties = rows * 0
    tie_budget = num_rows * 0
    if NUM_DRAFTS > 0:
        keys = survival_keys(
            confidences_ptr,
            confidences_stride,
            num_drafts_ptr,
            table_ptr,
            b_offs,
            b_mask,
            is_live,
            NUM_DRAFTS,
            NUM_BINS,
            HAS_NUM_DRAFTS,
        )
        threshold, tie_budget = find_threshold(keys, num_rows - tl.sum(rows, axis=0), NUM_DRAFTS)
        for j in tl.static_range(NUM_DRAFTS):
            rows += (keys[j] > threshold).to(tl.int32)
            ties += (keys[j] == threshold).to(tl.int32)
    return lengths_from_ties(rows, ties, tie_budget, 0, 0)


@triton.jit(do_not_specialize=["num_requests", "out_requests", "num_rows"])
def select_kernel(
    # inputs: confidences [B, k]; slots, num_drafts [B]; table [k, NUM_BINS]
    confidences_ptr,
    slots_ptr,
    num_drafts_ptr,
    table_ptr,
    # output [C + 1], C >= B
    cu_seqlens_ptr,
    # scalars and strides
    num_requests,
    out_requests,
    num_rows,
    confidences_stride,
    # sizes and switches
    NUM_DRAFTS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    HAS_NUM_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b_offs = tl.arange(0, BLOCK)
    b_mask = b_offs < num_requests
    is_live = tl.load(slots_ptr + b_offs, mask=b_mask, other=-1) >= 0

    start, length = select_in_block(
        confidences_ptr,
        confidences_stride,
        num_drafts_ptr,
        table_ptr,
        b_offs,
        b_mask,
        is_live,
        num_rows,
        NUM_DRAFTS,
        NUM_BINS,
        HAS_NUM_DRAFTS,
    )

    tl.store(cu_seqlens_ptr, 0)
    tl.store(cu_seqlens_ptr + 1 + b_offs, start + length, mask=b_offs < out_requests)
