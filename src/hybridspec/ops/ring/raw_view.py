"""The ring that keeps rows as they came, and what it looks like when it is right."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec.ops._checks import (
    FLOATS,
    WIDE,
    Dims,
    check,
    check_dtype,
    check_last_stride,
    check_option,
)
from hybridspec.ops._library import Written
from hybridspec.ops.ring.view import RingView

__all__ = ["RawRingView", "check_raw_ring", "check_raw_ring_shapes", "raw_ring_tensors"]


class RawRingView(NamedTuple):
    """Raw ring of one layer, and the cursors that all layers of a request share.

    Corrections are recomputed from these rows, so a window and the rows of a step are solved as one
    system: W + T rows at most. Live rows of slot s are (ring_start[s] + j) mod R for
    j < history_len[s].

    Attributes:
        k: [S, H, R, K], keys before they are normalised.
        v: [S, HV, R, V], values.
        a: [S, HV, R], fp32, decay inputs.
        b: [S, HV, R], fp32, write strength inputs.
        ring_start: [S], int32, contiguous. Of a call whose cursors belong to batch rows: [B].
        history_len: [S], int32, contiguous; or [B] likewise.
        max_window: most live rows (W); R >= W + T.
    """

    k: Written[Tensor]
    v: Written[Tensor]
    a: Written[Tensor]
    b: Written[Tensor]
    ring_start: Tensor
    history_len: Tensor
    max_window: int

    def for_prefill(self) -> RingView:
        """Return these tensors as the ring that `prefill` takes, which looks at cursors alone."""
        return RingView(self.k, self.v, self.a, self.ring_start, self.history_len, self.max_window)


def raw_ring_tensors(ring: RawRingView) -> dict[str, Tensor | None]:
    """Name the tensors of a ring as messages do."""
    return {f"ring.{name}": getattr(ring, name) for name in ring._fields[:6]}


def check_raw_ring_shapes(ring: RawRingView, dims: Dims, cursors: str) -> None:
    """Raise unless the sizes of a ring fit together, with those bound so far.

    Args:
        ring: the ring.
        dims: sizes bound so far.
        cursors: "S" if there is a cursor per slot, else "B".
    """
    if not isinstance(ring, RawRingView):
        raise TypeError(f"ring: expected a RawRingView, got {type(ring).__name__}")
    check("ring.k", ring.k, "S H R K", dims)
    check("ring.v", ring.v, "S HV R V", dims)
    check("ring.a", ring.a, "S HV R", dims)
    check("ring.b", ring.b, "S HV R", dims)
    check("ring.ring_start", ring.ring_start, cursors, dims)
    check("ring.history_len", ring.history_len, cursors, dims)


def check_raw_ring(ring: RawRingView, max_verify_tokens: int) -> None:
    """Raise unless dtypes, strides, capacity and window of a ring are right."""
    check_dtype("ring.k", ring.k, *FLOATS)
    check_dtype("ring.v", ring.v, ring.k.dtype)
    check_dtype("ring.a", ring.a, *WIDE)
    check_dtype("ring.b", ring.b, ring.a.dtype)
    for name, part in list(raw_ring_tensors(ring).items()):
        assert part is not None
        check_last_stride(name, part)
    for name, cursor in (("ring_start", ring.ring_start), ("history_len", ring.history_len)):
        check_dtype(f"ring.{name}", cursor, torch.int32)
    check_option("ring.max_window", ring.max_window, int, low=1)
    check_option("max_verify_tokens", max_verify_tokens, int, low=1)
    capacity, needed = ring.k.shape[2], ring.max_window + max_verify_tokens
    if capacity & (capacity - 1):
        raise ValueError(f"ring.k: expected a power of two as ring capacity, got {capacity}")
    if needed > capacity:
        raise ValueError(
            f"max_verify_tokens: a window of {ring.max_window} rows and {max_verify_tokens} more "
            f"need {needed} ring rows, got {capacity}; use a larger ring"
        )
