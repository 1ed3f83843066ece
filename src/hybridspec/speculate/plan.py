"""Which rows a step verifies: the most probable drafts of the whole batch, within a budget.

A draft counts only if all before it are accepted, so its worth is the product of the confidences up
to it, and the best rows of a batch are always prefixes. The output never depends on this choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops.verify_plan import Step, plan_step
from hybridspec.speculate.decoder import Decoder

__all__ = ["drafted_confidences", "plan_rows"]


def plan_rows(decoder: Decoder, lanes: Tensor, step: Step, *, num_rows: int) -> Tensor:
    """Lay out the newest token of each request and its best drafts.

    Args:
        decoder: newest tokens, drafts, confidences and cursors; in.
        lanes: slots of the batch, -1 = padding, no slot twice, [B] int32; in.
        step: of B requests and at least `num_rows` rows; out.
        num_rows: most rows, at least B.

    Returns:
        `lanes` with -1 where a request is done, which has no rows, [B] int32.
    """
    pools, requests = decoder.pools, decoder.requests
    rows = requests.rows_of(lanes)
    slots = torch.where(requests.is_done.index_select(0, rows) == 0, lanes, -1)
    num_drafts, options = requests.num_drafts.index_select(0, rows), pools.specs.options
    if options.is_aligned:
        # A window is folded full or not at all: drafts end at its border, a full one folds first.
        live = pools.history_len.index_select(0, rows.clamp(max=pools.num_slots - 1))
        room = options.max_window - live % options.max_window
        num_drafts = torch.minimum(num_drafts, room - 1)
    plan_step(
        requests.confidences.index_select(0, rows),
        requests.next_tokens.index_select(0, rows),
        slots,
        pools.seq_len,
        pools.history_len,
        ring_start=None if options.is_aligned else pools.ring_start,
        num_rows=num_rows,
        num_drafts=num_drafts,
        calibration=decoder.calibration,
        max_window=options.max_window,
        plan=step,
    )
    return slots


def drafted_confidences(decoder: Decoder, lanes: Tensor) -> Tensor:
    """Return the confidences of the drafts that requests have, 0 where they have none.

    Args:
        decoder: drafts and confidences; in.
        lanes: slots of the batch, -1 = padding, [B] int32; in.

    Returns:
        [B, k] fp32.
    """
    requests = decoder.requests
    rows = requests.rows_of(lanes)
    index = torch.arange(requests.most_drafts, device=lanes.device)
    has_draft = index < requests.num_drafts.index_select(0, rows).unsqueeze(-1)
    return torch.where(has_draft, requests.confidences.index_select(0, rows), 0.0)
