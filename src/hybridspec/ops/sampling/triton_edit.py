"""A request's options applied to its logits: bias, penalties, forbidden tokens.

In place, and only where something changes. A NaN or +inf is left where it is, so that it shows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.sampling import table

__all__ = ["edit_kernel"]

COUNT_MASK: tl.constexpr = tl.constexpr(table.COUNT_MASK)
NOTHING: tl.constexpr = tl.constexpr(float("-inf"))
BROKEN: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def add_bias(row_ptr, tokens_ptr, values_ptr, start, length, begin, end, GROUP: tl.constexpr):
    """logit + bias for the tokens of begin .. end - 1."""
    for group in range(0, length, GROUP):
        place = group + tl.arange(0, GROUP)
        is_entry = place < length
        token = tl.load(tokens_ptr + start + place, mask=is_entry, other=-1)
        value = tl.load(values_ptr + start + place, mask=is_entry, other=0.0)
        is_mine = (token >= begin) & (token < end)
        x = tl.load(row_ptr + token, mask=is_mine, other=0.0)
        tl.store(row_ptr + token, x + value, mask=is_mine)


@triton.jit
def penalise(x, index, held, drafts_ptr, offset, repetition, frequency, presence):
    """Logits after the penalties, and of which tokens they may have changed."""
    count = held & COUNT_MASK
    for j in range(0, offset):
        count += (index == tl.load(drafts_ptr + j)).to(tl.int32)
    is_said = count > 0
    is_seen = is_said | (held < 0)
    repeated = tl.where(
        x > 0, tl.div_rn(x, tl.zeros(x.shape, tl.float32) + repetition), x * repetition
    )
    x = tl.where(is_seen, repeated, x)
    x = x - frequency * count.to(tl.float32)
    return x - presence * is_said.to(tl.float32), is_seen


@triton.jit
def token_at(place, seq_len, drafts_ptr, token_pages_ptr, pages_ptr, page_size, page_stride):
    """Token of a request at a position, -1 in front of the first."""
    token = tl.full([], -1, tl.int64)
    if place > seq_len:
        token = tl.load(drafts_ptr + place - seq_len - 1)
    elif place >= 0:
        page = tl.load(pages_ptr + place // page_size).to(tl.int64)
        token = tl.load(token_pages_ptr + page * page_stride + place % page_size).to(tl.int64)
    return token


@triton.jit
def forbid_words(
    row_ptr, bounds_ptr, tokens_ptr, start, length, begin, end, position, seq_len, drafts_ptr,
    token_pages_ptr, pages_ptr, page_size, page_stride, GROUP: tl.constexpr,
):  # fmt: skip
    """-inf for the last tokens of the words of which all others stand in front of the row."""
    for group in range(0, length, GROUP):
        place = group + tl.arange(0, GROUP)
        is_begun = place < length
        first = tl.load(bounds_ptr + start + place, mask=is_begun, other=0)
        last = tl.load(bounds_ptr + start + place + 1, mask=is_begun, other=1) - 1
        target = tl.load(tokens_ptr + last, mask=is_begun, other=-1)
        longest = tl.max(last - first, 0)
        for back in range(1, longest + 1):
            token = token_at(
                position - back, seq_len, drafts_ptr, token_pages_ptr, pages_ptr, page_size,
                page_stride,
            )  # fmt: skip
            is_within = last - back >= first
            wanted = tl.load(tokens_ptr + last - back, mask=is_begun & is_within, other=-2)
            is_begun = is_begun & ((is_within == 0) | (wanted == token))
        is_mine = is_begun & (target >= begin) & (target < end)
        x = tl.load(row_ptr + target, mask=is_mine, other=BROKEN)
        tl.store(
            row_ptr + target,
            tl.full(target.shape, NOTHING, tl.float32),
            mask=is_mine & (x < BROKEN),
        )


@triton.jit
def edit_kernel(
    # logits [N, V] in-out, rows [N], by slot
    logits_ptr, slots_ptr, offsets_ptr, seq_len_ptr, drafts_ptr, token_pages_ptr, page_table_ptr,
    mask_ptr,
    # the table
    repetition_ptr, frequency_ptr, presence_ptr, ends_from_ptr, end_bits_ptr, allowed_bits_ptr,
    count_row_ptr, counts_ptr, bias_start_ptr, bias_len_ptr, bias_tokens_ptr, bias_values_ptr,
    word_start_ptr, word_len_ptr, word_bounds_ptr, word_tokens_ptr,
    vocab, num_bits, page_size, tiles_per_program, row_stride, drafts_stride, page_stride,
    table_stride, mask_stride,
    HAS_COUNTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WORDS: tl.constexpr,
    HAS_MASKS: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Edit the logits of one row in one range of tokens."""
    row = tl.program_id(0).to(tl.int64)
    first_tile = tl.program_id(1) * tiles_per_program
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        row_ptr = logits_ptr + row * row_stride
        slot_drafts_ptr = drafts_ptr + slot * drafts_stride
        offset = tl.load(offsets_ptr + row)
        seq_len = tl.load(seq_len_ptr + slot)
        position = seq_len + 1 + offset
        begin = first_tile * BLOCK
        end = tl.minimum(begin + tiles_per_program * BLOCK, vocab)

        if HAS_BIAS:
            add_bias(
                row_ptr, bias_tokens_ptr, bias_values_ptr, tl.load(bias_start_ptr + slot),
                tl.load(bias_len_ptr + slot), begin, end, GROUP,
            )  # fmt: skip
            tl.debug_barrier()

        if HAS_COUNTS or HAS_MASKS or HAS_MASK:
            count_row = tl.load(count_row_ptr + slot).to(tl.int64) if HAS_COUNTS else -1
            is_early = position < tl.load(ends_from_ptr + slot)
            for tile_begin in range(begin, end, BLOCK):
                index = tile_begin + tl.arange(0, BLOCK)
                is_token = index < end
                is_forbidden = index < 0
                if HAS_MASKS or HAS_MASK:
                    word = index >> 5
                    allowed = tl.full([BLOCK], -1, tl.int32)
                    if HAS_MASKS:
                        bits_at = slot * num_bits + word
                        allowed = tl.load(allowed_bits_ptr + bits_at, mask=is_token, other=-1)
                        if is_early:
                            ends = tl.load(end_bits_ptr + bits_at, mask=is_token, other=0)
                            allowed = allowed & ~ends
                    if HAS_MASK:
                        allowed &= tl.load(
                            mask_ptr + row * mask_stride + word, mask=is_token, other=-1
                        )
                    is_forbidden = ((allowed >> (index & 31)) & 1) == 0
                # Most rows forbid little, so little is read.
                is_changed = is_forbidden | (index * 0 + count_row >= 0)
                x = tl.load(row_ptr + index, mask=is_token & is_changed, other=0.0)
                if count_row >= 0:
                    held = tl.load(
                        counts_ptr + count_row * vocab + index, mask=is_token, other=0
                    ).to(tl.int32)
                    x, is_seen = penalise(
                        x, index, held, slot_drafts_ptr, offset,
                        tl.load(repetition_ptr + slot), tl.load(frequency_ptr + slot),
                        tl.load(presence_ptr + slot),
                    )  # fmt: skip
                    is_changed = is_forbidden | is_seen
                x = tl.where(is_forbidden & (x < BROKEN), NOTHING, x)
                tl.store(row_ptr + index, x, mask=is_token & is_changed)

        if HAS_WORDS:
            tl.debug_barrier()
            forbid_words(
                row_ptr, word_bounds_ptr, word_tokens_ptr, tl.load(word_start_ptr + slot),
                tl.load(word_len_ptr + slot), begin, end, position, seq_len, slot_drafts_ptr,
                token_pages_ptr, page_table_ptr + slot * table_stride, page_size, page_stride,
                GROUP,
            )  # fmt: skip
