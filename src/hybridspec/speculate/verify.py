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
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import Pools
from hybridspec.speculate.accept import accept_prefix
from hybridspec.speculate.choose import ChoiceRule, choose_and_report
from hybridspec.speculate.logprobs import TokenLogprobs

__all__ = ["Verified", "commit_rows", "verify_drafts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What one verify step found, before it is committed.

    Attributes:
        tokens: per request, the tokens to commit: accepted drafts and one recovered or bonus token.
        logprobs: per request, a report for each of these tokens, None where none is wanted.
        hidden: hidden states of all rows, [N, D], after the final norm.
        step: the row layout that produced them.
        history_len: live ring rows of each request before the step.
        is_fold: whether each request folded in this step.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs | None]]
    hidden: Tensor
    step: Step
    history_len: list[int]
    is_fold: list[bool]


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
    fed = torch.tensor([token for tokens in rows for token in tokens], device=device)
    step = Step.of_rows(slots, lengths, starts, fed, is_prefill=False)
    decide_folds(
        pools.history_len,
        step.slots,
        step.num_verify_tokens,
        step.is_fold,
        max_window=pools.specs.options.max_window,
        ring_start=pools.ring_start,
    )
    history = pools.history_len.tolist()

    hidden = model.forward(step, pools.memories)
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
        history_len=[history[slot] for slot in slots],
        is_fold=[flag != 0 for flag in step.is_fold.tolist()],
    )


def commit_rows(pools: Pools, verified: Verified, num_committed: Sequence[int]) -> None:
    """Move every cursor over the first `num_committed[b]` rows of each request."""
    step = verified.step
    commit(
        pools.seq_len,
        pools.ring_start,
        pools.history_len,
        step.slots,
        step.is_fold,
        step.num_verify_tokens,
        torch.tensor(num_committed, dtype=torch.int32, device=pools.device),
        ring_capacity=pools.specs.options.ring_capacity,
    )
