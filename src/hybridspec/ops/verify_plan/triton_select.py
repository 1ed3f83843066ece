"""Row selection within one block: scores in registers, a radix search for the worst chosen one.

Scores lie in 0..1, where the bits of an fp32 number order like the number, so a score's key is its
bit pattern: 30 bits. The search finds the largest threshold that at least the wanted number of keys
reach, three bits at a time from the top, and stops once a whole bin is wanted. It counts in 16-bit
fields: a block serves at most 32,767 drafts.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["safe", "select_in_block", "select_kernel", "survival_step"]


@triton.jit
def safe(value):
    """Value within 0..1; NaN and everything not above 0 is 0."""
    return tl.where(value > 0.0, tl.minimum(value, 1.0), 0.0)


@triton.jit
def survival_step(survival, confidence, table_ptr, j, mask, TABLE_BINS: tl.constexpr):
    """Survival of draft j from that of the draft before it; subnormal products are 0."""
    confidence = safe(confidence)
    if TABLE_BINS > 0:
        bins = tl.minimum((confidence * TABLE_BINS).to(tl.int32), TABLE_BINS - 1)
        confidence = safe(tl.load(table_ptr + j * TABLE_BINS + bins, mask=mask, other=0.0))
    survival = survival * confidence
    return tl.where(survival < 1.1754943508222875e-38, 0.0, survival)


@triton.jit
def survival_keys(
    confidences_ptr,
    confidences_stride,
    num_drafts_ptr, table_ptr,
    b_offs, b_mask, is_live,
    NUM_DRAFTS: tl.constexpr, TABLE_BINS: tl.constexpr, HAS_NUM_DRAFTS: tl.constexpr,
):  # fmt: skip
    """One vector of keys per draft; -1 where there is no draft to verify."""
    limit = tl.full(b_offs.shape, NUM_DRAFTS, tl.int32)
    if HAS_NUM_DRAFTS:
        limit = tl.load(num_drafts_ptr + b_offs, mask=b_mask, other=0)
    survival = tl.full(b_offs.shape, 1.0, tl.float32)
    row_ptr = confidences_ptr + b_offs.to(tl.int64) * confidences_stride
    keys = ()
    for j in tl.static_range(NUM_DRAFTS):
        confidence = tl.load(row_ptr + j, mask=b_mask, other=0.0).to(tl.float32)
        survival = survival_step(survival, confidence, table_ptr, j, b_mask, TABLE_BINS)
        key = survival.to(tl.int32, bitcast=True)
        keys = keys + (tl.where(is_live & (j < limit), key, -1),)
    return keys


@triton.jit
def digit_counts(keys, prefix, shift, NUM_DRAFTS: tl.constexpr):
    """How many keys that agree with `prefix` above bit shift + 2 have each value of bits
    shift .. shift + 2: words of two 16-bit fields, word w counts digits w and w + 4."""
    # Four bits per value are enough for the drafts of one request: there are at most seven.
    nibbles = tl.zeros(keys[0].shape, tl.uint32)
    for j in tl.static_range(NUM_DRAFTS):
        # A key below the prefix wraps to a large number.
        digit = (keys[j] - prefix).to(tl.uint32, bitcast=True) >> shift
        nibbles += tl.where(digit < 8, 1 << (digit * 4), 0)
    counts = nibbles.to(tl.int32, bitcast=True)
    fields: tl.constexpr = 0x000F000F
    # All words side by side, so that one reduction over the requests sums them.
    words = tl.join(
        tl.join(counts & fields, (counts >> 8) & fields),
        tl.join((counts >> 4) & fields, (counts >> 12) & fields),
    )
    sums = tl.reshape(tl.sum(words, axis=0), [4])
    index = tl.arange(0, 4)
    word0 = tl.sum(tl.where(index == 0, sums, 0), axis=0)
    word1 = tl.sum(tl.where(index == 1, sums, 0), axis=0)
    word2 = tl.sum(tl.where(index == 2, sums, 0), axis=0)
    word3 = tl.sum(tl.where(index == 3, sums, 0), axis=0)
    return word0, word1, word2, word3


@triton.jit
def pick_digit(words, wanted):
    """The largest digit that, with all above it, has `wanted` keys (0 if none has): the digit, its
    count, and how many keys have a larger one."""
    # Keys with this digit or a larger one, which rises as the digit falls; only this sum is serial.
    reached = wanted * 0
    picked = reached
    larger = reached
    at_least = reached + 0x7FFFFFFF
    for digit in tl.static_range(7, -1, -1):
        reached += (words[digit % 4] >> (16 * (digit // 4))) & 0xFFFF
        is_enough = (reached >= wanted) | (digit == 0)
        at_least = tl.minimum(at_least, tl.where(is_enough, reached, 0x7FFFFFFF))
        larger = tl.maximum(larger, tl.where(is_enough, 0, reached))
        if digit > 0:
            picked += is_enough.to(tl.int32)
    return picked, at_least - larger, larger


@triton.jit
def find_threshold(keys, is_live, num_rows, NUM_DRAFTS: tl.constexpr):
    """Threshold and number of ties such that the drafts above it and that many equal ones fill
    `num_rows` together with the first rows (or are all drafts), and the number of rows then."""
    first_large: tl.constexpr = 0x38000000
    counts = is_live.to(tl.int64)
    for j in tl.static_range(NUM_DRAFTS):
        counts += (keys[j] >= 0).to(tl.int64) << 16
        counts += (keys[j] >= first_large).to(tl.int64) << 32
    counts = tl.sum(counts, axis=0)
    num_live = (counts & 0xFFFF).to(tl.int32)
    num_keys = ((counts >> 16) & 0xFFFF).to(tl.int32)
    num_large = (counts >> 32).to(tl.int32)
    wanted = num_rows - num_live
    total = num_live + tl.minimum(wanted, num_keys)

    # Bits 29..27 of any score of at least 2^-15 are ones: mostly the first pass can be left out.
    is_all = wanted >= num_keys
    is_large = (num_large >= wanted) & (wanted < num_keys)
    is_whole = is_all.to(tl.int32)
    prefix = tl.where(is_large, first_large, 0)
    shift = tl.where(is_all, -1, tl.where(is_large, 24, 27))
    while shift >= 0:
        words = digit_counts(keys, prefix, shift, NUM_DRAFTS)
        digit, count, larger = pick_digit(words, wanted)
        prefix += digit << shift
        wanted -= larger
        # The whole bin is wanted: its lower bits do not matter any more.
        is_whole = (wanted >= count).to(tl.int32)
        shift = tl.where(is_whole > 0, -1, shift - 3)
    return prefix - is_whole, tl.where(is_whole > 0, 0, wanted), total


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
    num_drafts_ptr, table_ptr,
    b_offs, b_mask, is_live, num_rows,
    NUM_DRAFTS: tl.constexpr, TABLE_BINS: tl.constexpr, HAS_NUM_DRAFTS: tl.constexpr,
):  # fmt: skip
    """First row and rows of every request of a batch that fits one block, and all rows' number."""
    rows = is_live.to(tl.int32)
    ties = rows * 0
    if NUM_DRAFTS == 0:
        tie_budget = num_rows * 0
        total = tl.sum(rows, axis=0)
    else:
        keys = survival_keys(
            confidences_ptr, confidences_stride, num_drafts_ptr, table_ptr, b_offs, b_mask, is_live,
            NUM_DRAFTS, TABLE_BINS, HAS_NUM_DRAFTS,
        )  # fmt: skip
        threshold, tie_budget, total = find_threshold(keys, is_live, num_rows, NUM_DRAFTS)
        for j in tl.static_range(NUM_DRAFTS):
            rows += (keys[j] > threshold).to(tl.int32)
            ties += (keys[j] == threshold).to(tl.int32)
    start, length = lengths_from_ties(rows, ties, tie_budget, 0, 0)
    return start, length, total


@triton.jit(do_not_specialize=["num_requests", "out_requests", "num_rows"])
def select_kernel(
    # inputs: confidences [B, k]; slots, num_drafts [B]; table [k, TABLE_BINS]
    confidences_ptr, slots_ptr, num_drafts_ptr, table_ptr,
    # output [C + 1], C >= B
    cu_seqlens_ptr,
    # scalars and strides
    num_requests, out_requests, num_rows, confidences_stride,
    # sizes and switches
    NUM_DRAFTS: tl.constexpr, TABLE_BINS: tl.constexpr, HAS_NUM_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b_offs = tl.arange(0, BLOCK)
    b_mask = b_offs < num_requests
    is_live = tl.load(slots_ptr + b_offs, mask=b_mask, other=-1) >= 0

    start, length, _ = select_in_block(
        confidences_ptr, confidences_stride, num_drafts_ptr, table_ptr, b_offs, b_mask, is_live,
        num_rows, NUM_DRAFTS, TABLE_BINS, HAS_NUM_DRAFTS,
    )  # fmt: skip

    tl.store(cu_seqlens_ptr, 0)
    tl.store(cu_seqlens_ptr + 1 + b_offs, start + length, mask=b_offs < out_requests)
