"""The plan of a step as its definition reads: scores, the best rows, then one row after another."""

from __future__ import annotations

import itertools

from torch import Tensor

from hybridspec.ops.ring.fold_rule import first_fold_length
from hybridspec.ops.verify_plan.call import Cursors, Drafts
from hybridspec.ops.verify_plan.cpu import survival_scores
from hybridspec.ops.verify_plan.step import Step


def plan_step(
    drafts: Drafts, token_ids: Tensor, slots: Tensor, cursors: Cursors, num_rows: int, plan: Step
) -> None:
    """Give every live request a row, the rest of the budget to the best drafts; fill the plan."""
    scores, live = survival_scores(drafts.confidences, drafts.calibration), (slots >= 0).tolist()
    limits = [token_ids.shape[1] - 1] * len(live)
    if drafts.num_drafts is not None:
        limits = [min(most, n) for most, n in zip(limits, drafts.num_drafts.tolist(), strict=True)]
    candidates = [(b, j) for b, n in enumerate(limits) if live[b] for j in range(n)]
    candidates.sort(key=lambda row: -float(scores[row]))  # stable: equal ones stay in order
    chosen = [b for b, _ in candidates[: max(num_rows - sum(live), 0)]]
    counts = [int(is_live) + chosen.count(b) for b, is_live in enumerate(live)]
    counts += [0] * (len(plan.slots) - len(counts))
    for tensor, hold in zip(plan.tensors(), (0, 0, 0, -1, 0, 0, 0, -1, 0), strict=True):
        tensor.fill_(hold)
    plan.cu_seqlens[:] = plan.cu_seqlens.new_tensor([0, *itertools.accumulate(counts)])
    plan.slots[: len(live)] = slots
    for b, slot in enumerate(slots.tolist()):
        start, history, n = int(cursors.seq_len[slot]), int(cursors.history_len[slot]), counts[b]
        is_first = cursors.ring_start is not None and cursors.ring_start[slot] == 0
        most = first_fold_length(slot, cursors.max_window) if is_first else history + 1
        plan.num_verify_tokens[b], plan.kv_len[b] = n, start + n if n else 0
        plan.is_fold[b] = n > 0 and (history + n > cursors.max_window or history >= most)
        for j, row in enumerate(range(int(plan.cu_seqlens[b]), int(plan.cu_seqlens[b + 1]))):
            plan.token_ids[row], plan.positions[row] = token_ids[b, j], start + j
            plan.sources[row] = b * token_ids.shape[1] + j
