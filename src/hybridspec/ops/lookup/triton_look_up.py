"""One program per request reads its log backwards, until it has seen enough places."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["look_up_kernel"]


@triton.jit
def load_tokens(token_pages_ptr, pages_ptr, page_size, page_stride, position, mask):
    """Tokens of one request at some positions; -1 where masked."""
    page = tl.load(pages_ptr + position // page_size, mask=mask, other=0).to(tl.int64)
    at = page * page_stride + position % page_size
    return tl.load(token_pages_ptr + at, mask=mask, other=-1)


@triton.jit
def look_up_kernel(
    # inputs: tokens [P, page_size], [S, pages], [S], [B]
    token_pages_ptr, page_table_ptr, seq_len_ptr, slots_ptr,
    # outputs [B, k], [B], [B]
    drafts_ptr, num_ptr, agreement_ptr,
    count, page_size, page_stride, table_stride,
    NUM_TOKENS: tl.constexpr, MAX_PLACES: tl.constexpr, MAX_AGREEMENT: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_DRAFTS: tl.constexpr,
):  # fmt: skip
    """Drafts of one request."""
    lane = tl.program_id(0)
    slot = tl.load(slots_ptr + lane).to(tl.int64)
    best = tl.full([], 0, tl.int64)
    draft = tl.arange(0, BLOCK_DRAFTS)
    tokens = tl.full([BLOCK_DRAFTS], -1, tl.int32)
    if slot >= 0:
        pages_ptr = page_table_ptr + slot * table_stride
        length = tl.load(seq_len_ptr + slot) + 1
        end = length - NUM_TOKENS
        num_found = 0
        while (end > 0) & (num_found < MAX_PLACES):
            place = end - BLOCK + tl.arange(0, BLOCK) + NUM_TOKENS
            is_match = place >= NUM_TOKENS
            for back in tl.static_range(NUM_TOKENS):
                wanted = load_tokens(
                    token_pages_ptr, pages_ptr, page_size, page_stride, length - 1 - back, True
                )
                found = load_tokens(
                    token_pages_ptr, pages_ptr, page_size, page_stride, place - 1 - back, is_match
                )
                is_match = is_match & (found == wanted)
            num_here = tl.sum(is_match.to(tl.int32), 0)
            if num_here > 0:
                num_later = num_here - tl.cumsum(is_match.to(tl.int32), 0)
                is_same = is_match & (num_found + num_later < MAX_PLACES)
                agreeing = tl.where(is_same, NUM_TOKENS, 0)
                for further in range(NUM_TOKENS, MAX_AGREEMENT):
                    is_same = is_same & (place - 1 - further >= 0)
                    wanted = load_tokens(
                        token_pages_ptr, pages_ptr, page_size, page_stride, length - 1 - further,
                        length - 1 - further >= 0,
                    )  # fmt: skip
                    found = load_tokens(
                        token_pages_ptr, pages_ptr, page_size, page_stride, place - 1 - further,
                        is_same,
                    )  # fmt: skip
                    is_same = is_same & (found == wanted)
                    agreeing += is_same.to(tl.int32)
                # The most agreeing, then the latest.
                key = (agreeing.to(tl.int64) << 32) + place
                best = tl.maximum(best, tl.max(tl.where(agreeing > 0, key, 0), 0))
            num_found += num_here
            end -= BLOCK
        if best > 0:
            start = (best & 0xFFFFFFFF).to(tl.int32)
            tokens = load_tokens(
                token_pages_ptr, pages_ptr, page_size, page_stride,
                start + draft % (length - start), draft < count,
            )  # fmt: skip
    tl.store(
        drafts_ptr + lane.to(tl.int64) * count + draft, tokens.to(tl.int64), mask=draft < count
    )
    tl.store(num_ptr + lane, tl.where(best > 0, count, 0))
    tl.store(agreement_ptr + lane, (best >> 32).to(tl.int32))
