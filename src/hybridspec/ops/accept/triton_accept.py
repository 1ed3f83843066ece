"""Acceptance of one request per program."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["accept_kernel"]


@triton.jit(do_not_specialize=["words"])
def accept_kernel(
    # the batch: chosen [N]; cu_seqlens [B+1]; num_verify_tokens, slots, is_fold [B]
    chosen_ptr,
    cu_seqlens_ptr,
    num_rows_ptr,
    slots_ptr,
    is_fold_ptr,
    # by slot: history_len, seq_len [S]; last_position, is_done [S+1]; next_tokens [S+1, k+1]
    history_len_ptr,
    seq_len_ptr,
    last_position_ptr,
    is_done_ptr,
    next_tokens_ptr,
    # the token log: token_pages [P, PAGE]; page_table [S, pages]
    token_pages_ptr,
    page_table_ptr,
    # ends by slot: end_bits [S, words]; ends_from [S]; counts [C, V]; count_row [S]
    end_bits_ptr,
    ends_from_ptr,
    counts_ptr,
    count_row_ptr,
    # outputs: [B, 7 + 2 k]; num_committed [B]
    out_ptr,
    num_committed_ptr,
    # scalars and strides
    words,
    page_table_stride,
    counts_stride,
    # sizes
    NUM_DRAFTS: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + b).to(tl.int64)
    count = tl.load(num_rows_ptr + b)
    out = out_ptr + b * (7 + 2 * NUM_DRAFTS)
    is_live = (slot >= 0) & (count > 0)
    slot = tl.where(is_live, slot, 0)
    count = tl.where(is_live, count, 0)

    first = tl.load(cu_seqlens_ptr + b).to(tl.int64)
    newest = tl.load(seq_len_ptr + slot)
    last = tl.load(last_position_ptr + slot)
    ends_from = tl.load(ends_from_ptr + slot)
    count_row = tl.load(count_row_ptr + slot).to(tl.int64)
    next_tokens = next_tokens_ptr + slot * (NUM_DRAFTS + 1)

    accepted = 0
    committed = 0
    done = 0
    is_right = is_live  # whether every draft so far is right, so that this row's token counts
    newest_token = tl.load(next_tokens).to(tl.int64)
    for j in tl.static_range(NUM_DRAFTS + 1):
        is_row = is_right & (j < count)
        token = tl.load(chosen_ptr + first + j, mask=is_row, other=-1).to(tl.int64)
        is_taken = is_row & (done == 0) & (token >= 0)
        position = newest + 1 + j
        tl.store(out + 6 + j, tl.where(is_taken, token, -1).to(tl.int32))

        page = tl.load(
            page_table_ptr + slot * page_table_stride + position // PAGE, mask=is_taken, other=0
        ).to(tl.int64)
        log = token_pages_ptr + page * PAGE + position % PAGE
        tl.store(log, token.to(tl.int32), mask=is_taken)
        if HAS_COUNTS:
            held_ptr = counts_ptr + count_row * counts_stride + token
            is_counted = is_taken & (count_row >= 0)
            held = tl.load(held_ptr, mask=is_counted, other=0).to(tl.int32)
            is_counted &= (held & 0x7FFF) < 0x7FFF
            tl.store(held_ptr, (held + 1).to(tl.int16), mask=is_counted)
            tl.debug_barrier()  # the same token may follow

        word = tl.load(end_bits_ptr + slot * words + token // 32, mask=is_taken, other=0)
        is_end = is_taken & (position >= ends_from) & ((word >> (token % 32)) & 1 == 1)
        ended = tl.where(is_end, 1, tl.where(position >= last, 2, 0))
        reason = tl.where(is_taken, ended, tl.where(token < 0, 3, 0))
        done = tl.where(is_row & (done == 0), reason, done)
        committed += is_taken.to(tl.int32)
        newest_token = tl.where(is_taken, token, newest_token)
        if j < NUM_DRAFTS:
            draft = tl.load(next_tokens + 1 + j, mask=is_live, other=0)
            tl.store(out + 7 + NUM_DRAFTS + j, draft.to(tl.int32))
            is_right = is_row & (j + 1 < count) & (draft == token)
            accepted += is_right.to(tl.int32)

    tl.store(out + 0, committed)
    tl.store(num_committed_ptr + b, committed)
    tl.store(out + 1, accepted)
    tl.store(out + 2, count)
    tl.store(out + 3, tl.load(is_fold_ptr + b, mask=is_live, other=0).to(tl.int32))
    tl.store(out + 4, tl.load(history_len_ptr + slot, mask=is_live, other=0))
    tl.store(out + 5, done)
    tl.store(is_done_ptr + slot, done.to(tl.int8), mask=is_live & (done > 0))
    tl.store(next_tokens, newest_token, mask=is_live)
