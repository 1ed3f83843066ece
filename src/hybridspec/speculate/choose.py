"""Drafter-invariant choice of the token at a position of a request.

The token is argmax(processed logits + Gumbel noise(seed, position, token)), a pure function of the
prefix and of the request's parameters. Target and drafter both call it, with the same noise, which
makes them agree often and lets the output be independent of what was drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops.accept import accept_rows
from hybridspec.ops.sampling import choose
from hybridspec.ops.verify_plan import Step
from hybridspec.speculate.decoder import Asks, Decoder, Outcome
from hybridspec.speculate.logprobs import rank_logprobs

__all__ = ["choose_and_accept", "choose_tokens"]


def choose_tokens(
    decoder: Decoder,
    logits: Tensor,
    slots: Tensor,
    offsets: Tensor,
    asks: Asks,
    *,
    seq_len: Tensor,
) -> Tensor:
    """Choose one token per row; the logits may be overwritten.

    Args:
        decoder: the table of requests and their parameters; in.
        logits: raw scores, [N, vocab], fp32; in, scratch.
        slots: slot of each row, -1 = padding, [N] int32; in.
        offsets: drafts between the newest token and the token to choose, [N] int32; in.
        asks: what the rows may need.
        seq_len: position of the newest token of each slot, [S] int32; in.

    Returns:
        Token ids [N], int64; -1 where nothing can be chosen (`hybridspec.ops.sampling.choose`).
    """
    pools, drafts, mask = decoder.pools, decoder.requests.drafts, None
    if asks.overflow is not None:
        rows = zip(slots.tolist(), offsets.tolist(), strict=True)
        mask = asks.overflow(
            logits,
            [
                (slot, [*decoder.history(slot, seq_len), *drafts[slot, :ahead].tolist()])
                if slot >= 0
                else (slot, [])
                for slot, ahead in rows
            ],
        )
    return choose(
        logits,
        slots,
        offsets,
        decoder.sampling.table,
        seq_len,
        drafts,
        pools.token_pages,
        pools.page_table,
        mask=mask,
        uses=asks.uses,
    )


def choose_and_accept(
    decoder: Decoder, hidden: Tensor, step: Step, asks: Asks, *, seq_len: Tensor
) -> tuple[Tensor, Outcome]:
    """Choose the token after each row of a step and commit what is accepted, except cursors.

    Args:
        decoder: model and table of requests; tokens, ends and counts in-out.
        hidden: hidden states of the rows, [N, D]; in.
        step: layout of the rows; in.
        asks: what the requests may need.
        seq_len: position of the newest token of each slot, [S] int32; in.

    Returns:
        The tokens [N], int64, and what was accepted.
    """
    requests, sampling = decoder.requests, decoder.sampling.table
    logits = decoder.logits(hidden)
    raw = None if asks.num_logprobs is None else logits.clone()  # choosing may edit them
    width = step.max_seqlen
    # A padding row has source -1, so it is told apart by its sign; its owner is the last request.
    owner, offsets = step.sources, torch.zeros_like(step.sources)
    if width > 1:
        owner, offsets = step.sources // width, step.sources % width
    slots = step.slots.index_select(0, owner % step.slots.shape[0])
    if step.sources.is_cuda:
        slots = torch.where(owner >= 0, slots, -1)
    chosen = choose_tokens(decoder, logits, slots, offsets, asks, seq_len=seq_len)
    if decoder.forced is not None and width > 1:
        column = offsets.clamp(0, requests.most_drafts - 1)
        chosen = decoder.forced.judge(
            chosen,
            step.token_ids,
            slots,
            step.positions + 1,
            requests.confidences[slots, column],
            logits.shape[-1],
        )
    result = accept_rows(
        chosen,
        cu_seqlens=step.cu_seqlens,
        num_verify_tokens=step.num_verify_tokens,
        slots=step.slots,
        is_fold=step.is_fold,
        history_len=decoder.pools.history_len,
        requests=requests,
        log=decoder.log(seq_len),
        end_bits=sampling.end_bits,
        ends_from=sampling.ends_from,
        counts=sampling.counts,
        count_row=sampling.count_row,
    )
    report = None
    if raw is not None and asks.num_logprobs is not None:
        report = rank_logprobs(raw, chosen, asks.num_logprobs)
    return chosen, Outcome(result=result, report=report)
