"""Choosing tokens where a request is nothing but logits and a few numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops.sampling import SamplingTable, SamplingUses, choose

__all__ = ["choose_plain"]


def choose_plain(
    logits: Tensor,
    temperature: Tensor,
    *,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    **filters: Tensor,
) -> Tensor:
    """Choose one token per row of logits, [N].

    Args:
        logits: [N, V], fp32.
        temperature: [N].
        seeds: [N], or None for 0, 1, 2, ...
        positions: [N], from 1 on, or None for 1, 2, 3, ...
        **filters: other columns of the table, [N] each.
    """
    num_rows, device = logits.shape[0], logits.device
    ints = {"dtype": torch.int32, "device": device}
    rows = torch.arange(num_rows, **ints)
    table = SamplingTable.create(num_rows, logits.shape[1], device=device)
    columns = {"temperature": temperature, "seed": rows if seeds is None else seeds, **filters}
    for name, values in columns.items():
        getattr(table, name).copy_(values)
    nothing = torch.zeros(num_rows, 1, **ints)
    drafts = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
    seq_len = rows if positions is None else (positions - 1).to(torch.int32)
    uses = SamplingUses(has_noise=True, has_filters=bool(filters))
    return choose(logits, rows, rows * 0, table, seq_len, drafts, nothing, nothing, uses=uses)
