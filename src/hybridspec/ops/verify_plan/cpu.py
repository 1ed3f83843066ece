"""Row selection, building and compaction in PyTorch operators."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._library import Lasting, Written
from hybridspec.ops._requests import check_slots, write_numbers
from hybridspec.ops.ring.fold_rule import first_fold_length
from hybridspec.ops.verify_plan.call import Cursors, Drafts, Entries
from hybridspec.ops.verify_plan.sampling_columns import SamplingColumns
from hybridspec.ops.verify_plan.step import Step

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
    drafts: Drafts,
    slots: Tensor,
    num_rows: int,
    cu_seqlens: Written[Tensor],
    workspace: Written[Tensor],
) -> None:
    """Write `cu_seqlens` [B'+1] with B' >= B; see api.py. The workspace is not needed."""
    confidences, num_drafts, calibration = drafts
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


def build_params(token_ids: Tensor, slots: Tensor, cursors: Cursors, plan: Written[Step]) -> None:
    """Fill `plan` from its own `cu_seqlens`; see api.py."""
    seq_len, history_len, ring_start, max_window = cursors
    num_requests, tokens_per_request = token_ids.shape
    if num_requests == 0:
        zeros = ("num_verify_tokens", "kv_len", "is_fold", "token_ids", "positions")
        for name in zeros:
            getattr(plan, name).zero_()
        plan.slots.fill_(-1)
        plan.sources.fill_(-1)
        return
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
    drafts: Drafts,
    token_ids: Tensor,
    slots: Tensor,
    cursors: Lasting[Cursors],
    num_rows: int,
    plan: Lasting[Written[Step]],
) -> None:
    """Select, then build; see api.py."""
    if not slots.is_cuda and _plan_all(drafts, token_ids, slots, cursors, num_rows, plan):
        return
    select_rows(drafts, slots, num_rows, plan.cu_seqlens, plan.workspace)
    build_params(token_ids, slots, cursors, plan)


def _one_at_least(values: Tensor) -> Tensor:
    """The same, or one row of zeros for padding rows to look at where there is none."""
    return values if values.shape[0] else values.new_zeros(1, *values.shape[1:])


def _plan_all(
    drafts: Drafts, token_ids: Tensor, slots: Tensor, cursors: Cursors, num_rows: int, plan: Step
) -> bool:
    """Lay out every draft on a CPU, where Python is quicker than forty operators of a few numbers.

    Returns:
        False, with nothing written, if the budget does not hold them all.
    """
    num_drafts, (seq_len, history_len, ring_start, max_window) = drafts.num_drafts, cursors
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
        write_numbers(tensor, values)
    return True


def compact_hidden(hidden: Tensor, sources: Tensor, out: Written[Tensor]) -> None:
    """out[i] = hidden[sources[i]], zeros where that is negative."""
    is_owned = (sources >= 0)[:, None]
    out.copy_(torch.where(is_owned, _one_at_least(hidden)[sources.clamp(min=0).long()], 0))


def compact_sampling(
    requests: SamplingColumns,
    sources: Tensor,
    rows_per_request: int,
    rows: Written[SamplingColumns],
) -> None:
    """Spread request entries over their rows; padding rows are greedy with every filter off."""
    is_owned = sources >= 0
    request = sources.clamp(min=0).long() // rows_per_request
    for name in SamplingColumns.__slots__:
        off = 1 if name == "top_p" else 0
        chosen = _one_at_least(getattr(requests, name))[request]
        getattr(rows, name).copy_(torch.where(is_owned, chosen, off))


def compact_groups(
    requests: Tensor, seq_len: Tensor, marks: Tensor, hold_request: int, out: Written[Entries]
) -> None:
    """Entry i of `out` = (mark, seq_len, request) of the i-th group end; see entries.py."""
    num_entries = out.request.shape[0]
    is_end = marks > 0
    if not marks.is_cuda and (num_groups := int(is_end.sum())) > num_entries:
        raise ValueError(f"num_entries: expected room for {num_groups} groups, got {num_entries}")
    # Rows that end no group, and groups without an entry, go to one entry more, which is cut off.
    entry = torch.where(is_end, is_end.cumsum(0) - 1, num_entries).clamp(max=num_entries)
    for tensor, values, hold in zip(
        out, (marks, seq_len, requests), (0, 0, hold_request), strict=True
    ):
        padded = tensor.new_full((num_entries + 1,), hold)
        tensor.copy_(padded.scatter_(0, entry, values.to(tensor.dtype))[:num_entries])


def copy_page_table(page_table: Written[Tensor], source: Tensor, requests: Tensor) -> None:
    """page_table[i] = source[requests[i], :width]."""
    page_table.copy_(source[:, : page_table.shape[1]][requests.long()])
