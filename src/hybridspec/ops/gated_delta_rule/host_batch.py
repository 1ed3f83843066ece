"""Packed rows of a batch, read on the host, and the way to padded rows and back.

Only rows that belong to a request with a slot ever leave the packed tensors, by selection; padding
is zero. A batch whose requests are equally long and adjacent is a plain view.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from hybridspec.ops._requests import check_bounds, check_distinct, check_lengths

__all__ = ["HostBatch"]


class HostBatch(NamedTuple):
    """The requests that have rows.

    Attributes:
        requests: index of each in the batch.
        slots: slot of each.
        firsts: first packed row of each.
        lengths: rows of each.
        size: most rows of one.
        is_dense: whether the rows are adjacent and equally many.
    """

    requests: list[int]
    slots: list[int]
    firsts: list[int]
    lengths: list[int]
    size: int
    is_dense: bool

    @classmethod
    def read(
        cls,
        cu_seqlens: Tensor,
        slots: Tensor,
        *,
        num_rows: int,
        num_slots: int,
        max_verify_tokens: int,
    ) -> HostBatch:
        """Read the batch; raises ValueError as `read_batch`, and for a slot that occurs twice."""
        bounds, numbers = tuple(cu_seqlens.tolist()), tuple(slots.tolist())
        return cls._of(bounds, numbers, num_rows, num_slots, max_verify_tokens)

    @classmethod
    @functools.lru_cache(maxsize=16)  # all layers of a step ask the same
    def _of(
        cls,
        bounds: tuple[int, ...],
        numbers: tuple[int, ...],
        num_rows: int,
        num_slots: int,
        max_verify_tokens: int,
    ) -> HostBatch:
        check_bounds(bounds, numbers, num_rows=num_rows, num_slots=num_slots)
        live = [i for i, slot in enumerate(numbers) if slot >= 0 and bounds[i + 1] > bounds[i]]
        check_distinct([numbers[i] for i in live])
        firsts = [bounds[i] for i in live]
        lengths = [bounds[i + 1] - bounds[i] for i in live]
        size = max(lengths, default=0)
        if size > max_verify_tokens:
            check_lengths("max_verify_tokens", max_verify_tokens, bounds)
        # rows come in the order of requests, so that a gap would move the last one
        is_dense = lengths.count(size) == len(live) and (
            not live or firsts[-1] - firsts[0] == size * (len(live) - 1)
        )
        return cls(live, [numbers[i] for i in live], firsts, lengths, size, is_dense)

    def by_head(self, packed: Tensor) -> Tensor:
        """Return [B * heads, T, ...] of packed rows [N, heads, ...], a view where possible."""
        count, size = len(self.slots), self.size
        num_rows = count * size
        if not self.is_dense:
            padded = packed.new_zeros((num_rows, *packed.shape[1:]))
            for i, (first, n) in enumerate(zip(self.firsts, self.lengths, strict=True)):
                padded.narrow(0, i * size, n).copy_(packed.narrow(0, first, n))
            packed = padded
        elif num_rows != packed.shape[0]:
            packed = packed.narrow(0, self.firsts[0], num_rows)
        if count == 1:
            return packed.transpose(0, 1)
        return packed.unflatten(0, (count, size)).transpose(1, 2).flatten(0, 1)

    def pack(self, rows: Tensor, packed: Tensor) -> None:
        """Write rows [B * heads, T, ...] to their packed places, and zeros everywhere else."""
        count, heads = len(self.slots), packed.shape[1]
        num_rows = count * self.size
        if num_rows != packed.shape[0] or not self.is_dense:
            packed.zero_()
        elif count == 1:
            packed.copy_(rows.transpose(0, 1))
            return
        for i, (first, n) in enumerate(zip(self.firsts, self.lengths, strict=True)):
            mine = rows.narrow(0, i * heads, heads).narrow(1, 0, n)
            packed.narrow(0, first, n).copy_(mine.transpose(0, 1))
