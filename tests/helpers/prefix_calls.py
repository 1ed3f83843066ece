"""A call of materialize_rows: windows that wrap, copies, padding and rows that are skipped."""

from __future__ import annotations

import torch
from torch import Tensor

from helpers.gdn_cases import Dtypes, Geometry, Pools
from hybridspec.ops.gated_delta_rule.prefix import materialize_rows

__all__ = ["PrefixCall"]


class PrefixCall:
    """Eight requests on twelve slots; NaN in everything that must not be read.

    Requests 0 to 3 take in 16 (or 15), 1, 7 and 0 rows; 4 to 7 are skipped: no slot to read, none
    to write, a negative number of rows, more than a window.
    """

    def __init__(self, dtypes: Dtypes, capacity: int = 32, device: str = "cpu") -> None:
        self.device = device
        self.geometry = Geometry(2, 4, 32, 48, capacity, min(16, capacity - 1), 12)
        self.pools = Pools.create(self.geometry, dtypes, device)
        generator = torch.Generator().manual_seed(0)
        most = self.geometry.max_window
        starts, lengths = (capacity - 3, 5, 0, 2, 1, 1, 1, 1), (most, 3, 7, 4, 4, 4, 4, 4)
        for slot in range(8):
            self.pools.fill_slot(slot, starts[slot], lengths[slot], generator)
        self.pools.state[0, 0, 0, 0] = -0.0
        self.pools.state[3, 0, 0, 0] = -0.0
        self.slots = self._int32(0, 1, 2, 3, -1, 5, 6, 7)
        self.out_slots = self._int32(8, 9, 10, 11, 4, -1, 6, 7)
        self.starts = self._int32(*starts)
        self.counts = self._int32(most, 1, 7, 0, 2, 2, -1, most + 1)

    def _int32(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def run(self, **options: object) -> Tensor:
        """Return the states after the call; the pools stay."""
        state, ring = self.pools.state.clone(), self.pools.ring
        materialize_rows(
            state, ring.k, ring.u, ring.cum_log_decay, self.slots, self.out_slots, self.starts,
            self.counts, max_window=self.geometry.max_window, **options,
        )  # fmt: skip
        return state
