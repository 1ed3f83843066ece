"""One verify step: score a request's last token and its drafts, and keep the correct prefix.

Rejected rows leave no trace: they lie past the cursors that `commit_rows` moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec.models import HybridModel
from hybridspec.ops.ring import commit, decide_folds
from hybridspec.runtime import Pools, Step
from hybridspec.speculate.accept import accept_prefix
from hybridspec.speculate.choose import ChoiceRule, choose_and_report
from hybridspec.speculate.logprobs import TokenLogprobs

__all__ = ["Verified", "commit_rows", "layout_rows", "verify_drafts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What one verify step found, before it is committed.

    Attributes:
        tokens: per request, the tokens to commit: accepted drafts and one recovered or bonus token.
        logprobs: per request, a report for each of these tokens, None where none is wanted.
        hidden: hidden states of all rows, [N, D], after the final norm.
        step: the row layout that produced them.
        num_verify_tokens: [B] int32, rows per request.
        history_len: live ring rows of each request before the step.
        is_fold: whether each request folded in this step.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs | None]]
    hidden: Tensor
    step: Step
    num_verify_tokens: Tensor
    history_len: list[int]
    is_fold: list[bool]


def layout_rows(
    slots: Sequence[int],
    lengths: Sequence[int],
    starts: Sequence[int],
    seq_len: Tensor,
    *,
    is_prefill: bool,
    is_fold: Tensor | None = None,
) -> Step:
    """Lay out `lengths[b]` rows from position `starts[b]` on, for each request b."""
    device = seq_len.device
    offsets = [0]
    positions: list[int] = []
    for length, start in zip(lengths, starts, strict=True):
        offsets.append(offsets[-1] + length)
        positions.extend(range(start, start + length))
    return Step(
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=device),
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        seq_len=seq_len,
        max_rows=max(lengths),
        is_prefill=is_prefill,
        is_fold=is_fold,
    )


def verify_drafts(
    model: HybridModel,
    pools: Pools,
    slots: Sequence[int],
    rows: Sequence[Sequence[int]],
    starts: Sequence[int],
    rules: Sequence[ChoiceRule],
) -> Verified:
    """Run the target model over each request's last token and drafts, and accept.

    Appends to the logs of the requests and moves no cursor.

    Args:
        model: the target model.
        pools: the memories; rows past the cursors are written, and checkpoints where a fold is due.
        slots: slot of each request.
        rows: per request, its newest committed token followed by its drafts.
        starts: per request, the position of its newest committed token.
        rules: per request, how its tokens are chosen.
    """
    device = pools.device
    lengths = [len(tokens) for tokens in rows]
    num_verify_tokens = torch.tensor(lengths, dtype=torch.int32, device=device)
    is_fold = torch.empty(len(slots), dtype=torch.int8, device=device)
    step = layout_rows(slots, lengths, starts, pools.seq_len, is_prefill=False, is_fold=is_fold)
    decide_folds(
        pools.history_len,
        step.slots,
        num_verify_tokens,
        is_fold,
        max_window=pools.geometry.max_window,
        ring_start=pools.ring_start,
    )
    history = pools.history_len.tolist()
    fed = torch.tensor([token for tokens in rows for token in tokens], device=device)

    hidden = model.forward(fed, step, pools)
    row_rules = [rule for rule, n in zip(rules, lengths, strict=True) for _ in range(n)]
    targets = [start + t + 1 for start, n in zip(starts, lengths, strict=True) for t in range(n)]
    pending = [mine[1 : t + 1] for mine in rows for t in range(len(mine))]
    chosen, reports = choose_and_report(model.logits(hidden), row_rules, targets, pending)
    tokens, logprobs, offset = [], [], 0
    for mine in rows:
        tokens.append(accept_prefix(chosen[offset : offset + len(mine)], mine[1:]))
        logprobs.append(reports[offset : offset + len(tokens[-1])])
        offset += len(mine)
    return Verified(
        tokens=tokens,
        logprobs=logprobs,
        hidden=hidden,
        step=step,
        num_verify_tokens=num_verify_tokens,
        history_len=[history[slot] for slot in slots],
        is_fold=[flag != 0 for flag in is_fold.tolist()],
    )


def commit_rows(pools: Pools, verified: Verified, num_committed: Sequence[int]) -> None:
    """Move every cursor over the first `num_committed[b]` rows of each request."""
    step = verified.step
    assert step.is_fold is not None
    commit(
        pools.seq_len,
        pools.ring_start,
        pools.history_len,
        step.slots,
        step.is_fold,
        verified.num_verify_tokens,
        torch.tensor(num_committed, dtype=torch.int32, device=pools.device),
        ring_capacity=pools.geometry.ring_capacity,
    )
