"""Rows with group marks, and what becomes of them in plain Python."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GROUPINGS", "group_case", "groups_plain"]

GROUPINGS = ("random", "one row each", "one group", "no group")


def group_case(num_rows: int, grouping: str) -> tuple[Tensor, Tensor, Tensor]:
    """Draw requests, sequence lengths and marks of packed rows, each [num_rows] int32."""
    generator = torch.Generator().manual_seed(num_rows)
    if grouping == "random":
        is_end = torch.rand(num_rows, generator=generator) < 0.3
    else:
        is_end = torch.full((num_rows,), grouping == "one row each")
        is_end[-1] |= grouping == "one group"
    ends = torch.nonzero(is_end).flatten()
    marks = torch.zeros(num_rows, dtype=torch.int32)
    marks[ends] = ends.diff(prepend=torch.tensor([-1])).to(torch.int32)
    seq_len = torch.randint(1, 100_000, (num_rows,), generator=generator, dtype=torch.int32)
    requests = torch.randint(0, 5000, (num_rows,), generator=generator, dtype=torch.int32)
    return requests, seq_len, marks


def groups_plain(
    requests: Tensor, seq_len: Tensor, marks: Tensor, num_entries: int, hold: int
) -> list[list[int]]:
    """Marks, sequence lengths and requests of the group ends, then the hold entries."""
    columns = zip(marks.tolist(), seq_len.tolist(), requests.tolist(), strict=True)
    entries = [entry for entry in columns if entry[0] > 0]
    entries += [(0, 0, hold)] * (num_entries - len(entries))
    return [[entry[i] for entry in entries] for i in range(3)]
