"""Plain PyTorch meaning of row selection, building and compaction; the oracle of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .._requests import check_slots
from ..ring.fold_rule import first_fold_length
from .step import Step
from .views import SamplingColumns

__all__ = [
    "build_params",
    "compact_groups",
    "compact_hidden",
    "compact_sampling",
    "copy_page_table",
    "plan_step",
    "select_rows",
    "survival_scores",
]

SMALLEST_SCORE = torch.finfo(torch.float32).tiny


def _safe(values: Tensor) -> Tensor:
    """Values within 0..1; NaN and everything not above 0 (-0 too) is 0."""
    return torch.where(values > 0, values.clamp(max=1.0), 0.0)


def survival_scores(confidences: Tensor, calibration: Tensor | None) -> Tensor:
    """Scores [B, k] fp32; see api.py."""
    num_drafts = confidences.shape[1]
    safe = _safe(confidences.to(torch.float32))
    if calibration is not None:
        num_bins = calibration.shape[1]
        bins = (safe * num_bins).to(torch.int64).clamp(max=num_bins - 1)
        columns = torch.arange(num_drafts, device=safe.device)
        safe = _safe(calibration[columns, bins])
    scores = torch.empty_like(safe)
    score = safe.new_ones(safe.shape[0])
    for j in range(num_drafts):
        score = score * safe[:, j]
        # Subnormal numbers count as 0: hardware may flush them or not.
        score = torch.where(score < SMALLEST_SCORE, 0.0, score)
        scores[:, j] = score
    return scores


def select_rows(
    confidences: Tensor,
    slots: Tensor,
    num_rows: int,
    num_drafts: Tensor | None,
    calibration: Tensor | None,
    cu_seqlens: Tensor,
    workspace: Tensor,
) -> None:
    """Write `cu_seqlens` [B'+1] with B' >= B; see api.py. The workspace is not needed."""
    num_requests, k = confidences.shape
    is_live = slots >= 0
    is_draft = is_live[:, None].expand(num_requests, k)
    if num_drafts is not None:
        is_draft = is_draft & (torch.arange(k, device=slots.device) < num_drafts[:, None])
    # Below every score, so that what is no draft comes last.
    scores = torch.where(is_draft, survival_scores(confidences, calibration), -1.0).flatten()
    # A stable sort leaves equal scores in the order request, then position.
    order = scores.sort(descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.shape[0], device=order.device)
    is_chosen = (rank < num_rows - is_live.sum()) & is_draft.flatten()
    counts = is_live + is_chosen.view(num_requests, k).sum(1)
    cu_seqlens[0] = 0
    cu_seqlens[1 : num_requests + 1] = counts.cumsum(0)
    cu_seqlens[num_requests + 1 :] = cu_seqlens[num_requests]


def build_params(
    token_ids: Tensor,
    slots: Tensor,
    seq_len: Tensor,
    history_len: Tensor,
    ring_start: Tensor | None,
    max_window: int,
    plan: Step,
) -> None:
    """Fill `plan` from its own `cu_seqlens`; see api.py."""
    num_requests, tokens_per_request = token_ids.shape
    check_slots("slots", slots.tolist(), seq_len.shape[0])
    counts = plan.cu_seqlens.diff()[:num_requests]
    is_live = slots >= 0
    counts = torch.where(is_live, counts, 0)
    has_rows = counts > 0
    # Index 0 stands in for padding: an empty pool does not occur, a wrapped -1 would read it too.
    pool_rows = slots.clamp(min=0).long()
    stored = torch.where(has_rows, seq_len[pool_rows], 0)
    history = history_len[pool_rows]
    plan.num_verify_tokens.zero_()[:num_requests] = counts
    plan.kv_len.zero_()[:num_requests] = stored + counts
    plan.slots.fill_(-1)[:num_requests] = slots
    is_due = history + counts > max_window
    if ring_start is not None:
        is_first = ring_start[pool_rows] == 0
        is_due |= is_first & (history >= first_fold_length(slots, max_window))
    plan.is_fold.zero_()[:num_requests] = has_rows & is_due

    rows = torch.arange(plan.token_ids.shape[0], device=slots.device)
    ends = plan.cu_seqlens[1 : num_requests + 1]
    request = torch.searchsorted(ends, rows.int(), right=True)
    is_owned = request < num_requests
    request = request.clamp(max=num_requests - 1)
    is_owned &= is_live[request]
    column = torch.where(is_owned, rows - plan.cu_seqlens[request], 0)
    plan.token_ids.copy_(torch.where(is_owned, token_ids[request, column], 0))
    plan.positions.copy_(torch.where(is_owned, stored[request] + column, 0))
    plan.sources.copy_(torch.where(is_owned, request * tokens_per_request + column, -1))


def plan_step(
    confidences: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    seq_len: Tensor,
    history_len: Tensor,
    ring_start: Tensor | None,
    num_rows: int,
    num_drafts: Tensor | None,
    calibration: Tensor | None,
    max_window: int,
    plan: Step,
) -> None:
    """Select, then build; see api.py."""
    if not slots.is_cuda and _plan_all(
        token_ids, slots, seq_len, history_len, ring_start, num_rows, num_drafts, max_window, plan
    ):
        return
    select_rows(
        confidences, slots, num_rows, num_drafts, calibration, plan.cu_seqlens, plan.workspace
    )
    build_params(token_ids, slots, seq_len, history_len, ring_start, max_window, plan)


def _plan_all(
    token_ids: Tensor,
    slots: Tensor,
    seq_len: Tensor,
    history_len: Tensor,
    ring_start: Tensor | None,
    num_rows: int,
    num_drafts: Tensor | None,
    max_window: int,
    plan: Step,
) -> bool:
    """Lay out every draft on a CPU, where Python is quicker than forty operators of a few numbers.

    Returns:
        False, with nothing written, if the budget does not hold them all.
    """
    numbers, (num_requests, tokens_per_request) = slots.tolist(), token_ids.shape
    check_slots("slots", numbers, seq_len.shape[0])
    limits = [tokens_per_request - 1] * num_requests
    if num_drafts is not None:
        limits = [min(max(n, 0), limits[0]) for n in num_drafts.tolist()] if limits else []
    counts = [0 if slot < 0 else 1 + n for slot, n in zip(numbers, limits, strict=True)]
    if sum(counts) > num_rows:
        return False
    fed, stored, history = token_ids.tolist(), seq_len.tolist(), history_len.tolist()
    starts = None if ring_start is None else ring_start.tolist()
    rooms, capacity = plan.slots.shape[0], plan.token_ids.shape[0]
    offsets, ends, folds, tokens = [0], [], [], []
    positions: list[int] = []
    sources: list[int] = []
    for b, (slot, count) in enumerate(zip(numbers, counts, strict=True)):
        first = stored[slot] if count else 0
        offsets.append(offsets[-1] + count)
        ends.append(first + count)
        is_due = history[slot] + count > max_window
        if starts is not None and starts[slot] == 0:
            is_due |= history[slot] >= first_fold_length(slot, max_window)
        folds.append(count > 0 and is_due)
        tokens += fed[b][:count]
        positions += range(first, first + count)
        sources += range(b * tokens_per_request, b * tokens_per_request + count)
    spare, hold = rooms - num_requests, capacity - len(tokens)
    for tensor, values in (
        (plan.cu_seqlens, offsets + [offsets[-1]] * spare),
        (plan.num_verify_tokens, counts + [0] * spare),
        (plan.kv_len, ends + [0] * spare),
        (plan.slots, numbers + [-1] * spare),
        (plan.is_fold, folds + [False] * spare),
        (plan.token_ids, tokens + [0] * hold),
        (plan.positions, positions + [0] * hold),
        (plan.sources, sources + [-1] * hold),
    ):
        tensor.copy_(torch.tensor(values))
    return True


def compact_hidden(hidden: Tensor, sources: Tensor, out: Tensor) -> None:
    """out[i] = hidden[sources[i]], zeros where that is negative."""
    is_owned = (sources >= 0)[:, None]
    out.copy_(torch.where(is_owned, hidden[sources.clamp(min=0).long()], 0))


def compact_sampling(
    requests: SamplingColumns, sources: Tensor, rows_per_request: int, rows: SamplingColumns
) -> None:
    """Spread request entries over their rows; hold rows are greedy with every filter off."""
    is_owned = sources >= 0
    request = sources.clamp(min=0).long() // rows_per_request
    for name in SamplingColumns.__slots__:
        off = 1 if name == "top_p" else 0
        chosen = getattr(requests, name)[request]
        getattr(rows, name).copy_(torch.where(is_owned, chosen, off))


def compact_groups(
    requests: Tensor, seq_len: Tensor, marks: Tensor, hold_request: int, out: list[Tensor]
) -> None:
    """Entry i of `out` = (mark, seq_len, request) of the i-th group end; see groups.py."""
    num_entries = out[0].shape[0]
    is_end = marks > 0
    # Rows that end no group, and groups without an entry, go to one entry more, which is cut off.
    entry = torch.where(is_end, is_end.cumsum(0) - 1, num_entries).clamp(max=num_entries)
    for tensor, values, hold in zip(
        out, (marks, seq_len, requests), (0, 0, hold_request), strict=True
    ):
        padded = tensor.new_full((num_entries + 1,), hold)
        tensor.copy_(padded.scatter_(0, entry, values.to(tensor.dtype))[:num_entries])


def copy_page_table(page_table: Tensor, source: Tensor, requests: Tensor) -> None:
    """page_table[i] = source[requests[i], :width]."""
    page_table.copy_(source[:, : page_table.shape[1]][requests.long()])
