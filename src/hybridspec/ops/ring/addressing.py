"""Where the rows of a slot lie in its ring, seen from the host: read, append, take in.

Rows that wrap around are two pieces; those that do not are plain views.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec.ops._requests import read_at
from hybridspec.ops.norms.reference import widened
from hybridspec.ops.ring.view import RingView

__all__ = ["Window", "append_rows", "live_rows", "read_cursors"]


class Window(NamedTuple):
    """Live ring rows of a batch, dead rows zero.

    Attributes:
        k: [B * H, P, K].
        u: [B * HV, P, V].
        cum: [B * HV, P], cumulative log-decay G.
        total: [B * HV, 1], G of the last live row, or 0 without one.
    """

    k: Tensor
    u: Tensor
    cum: Tensor
    total: Tensor

    @classmethod
    def read(
        cls,
        ring: RingView,
        slots: list[int],
        starts: list[int],
        lengths: list[int],
        dtype: torch.dtype,
    ) -> Window:
        """Gather the first `lengths[i]` live rows of each slot, in a dtype."""
        k = live_rows(ring.k, slots, starts, lengths, dtype)
        u = live_rows(ring.u, slots, starts, lengths, dtype)
        cum = live_rows(ring.cum_log_decay, slots, starts, lengths, dtype)
        if ring.has_token_decay:
            cum = cum.cumsum(1)
        if min(lengths) == max(lengths) > 0:
            return cls(k, u, cum, cum[:, -1:])
        total = cum.new_zeros((cum.shape[0], 1))
        value_heads = ring.u.shape[1]
        for i, n in enumerate(lengths):
            if n:
                mine = slice(i * value_heads, (i + 1) * value_heads)
                total[mine].copy_(cum[mine, n - 1 : n])
        return cls(k, u, cum, total)


def _pieces(start: int, count: int, capacity: int) -> list[tuple[int, int, int]]:
    """Cut ring rows into runs (ring row, row of the window, number of rows)."""
    head = min(count, capacity - start)
    if head == count:
        return [(start, 0, count)]
    return [(start, 0, head), (0, head, count - head)]


def _ring_rows(pool: Tensor, slot: int, first: int, count: int) -> Tensor:
    """View adjacent ring rows of a slot, [heads, count, ...], in one call."""
    shape, (slot_stride, *strides) = pool.shape, pool.stride()
    offset = pool.storage_offset() + slot * slot_stride + first * strides[1]
    return pool.as_strided((shape[1], count, *shape[3:]), strides, offset)


def live_rows(
    pool: Tensor, slots: list[int], starts: list[int], lengths: list[int], dtype: torch.dtype
) -> Tensor:
    """Gather the first `lengths[i]` rows of each slot, [B * heads, P, ...], dead rows zero."""
    capacity = pool.shape[2]
    if len(slots) == 1:
        [slot], [start], [count] = slots, starts, lengths
        head = capacity - start
        if count <= head:
            return widened(_ring_rows(pool, slot, start, count), dtype)
        pieces = _ring_rows(pool, slot, start, head), _ring_rows(pool, slot, 0, count - head)
        return widened(torch.cat(pieces, 1), dtype)
    shape = (len(slots), pool.shape[1], max(lengths), *pool.shape[3:])
    padded = pool.new_zeros(shape, dtype=dtype)
    for i, (slot, start, count) in enumerate(zip(slots, starts, lengths, strict=True)):
        for row, at, n in _pieces(start, count, capacity):
            padded[i, :, at : at + n].copy_(_ring_rows(pool, slot, row, n))
    return padded.flatten(0, 1)


def append_rows(
    pool: Tensor, by_head: Tensor, slots: list[int], starts: list[int], lengths: list[int]
) -> None:
    """Write the first `lengths[b]` rows of [B * heads, T, ...] into each ring from a row on."""
    heads = pool.shape[1]
    for i, (slot, start, count) in enumerate(zip(slots, starts, lengths, strict=True)):
        mine = by_head if len(starts) == 1 else by_head.narrow(0, i * heads, heads)
        for row, at, n in _pieces(start, count, pool.shape[2]):
            part = mine if n == mine.shape[1] else mine.narrow(1, at, n)
            _ring_rows(pool, slot, row, n).copy_(part)


def read_cursors(
    ring: RingView, slots: list[int], lengths: list[int]
) -> tuple[list[int], list[int]]:
    """Return ring_start and history_len of some slots, with room for so many rows behind them."""
    starts, live = read_at(ring.ring_start, slots), read_at(ring.history_len, slots)
    capacity = ring.k.shape[2]
    for slot, start, n, size in zip(slots, starts, live, lengths, strict=True):
        if not 0 <= start < capacity:
            raise ValueError(
                f"ring.ring_start: expected a row below {capacity} in slot {slot}, got {start}"
            )
        if not 0 <= n <= capacity - size:
            raise ValueError(
                f"ring.history_len: expected 0..{capacity - size} live rows in slot {slot}, ahead "
                f"of {size} new ones, got {n}"
            )
    return starts, live
