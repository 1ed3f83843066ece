"""The frozen views under which the ring tensors of one layer travel together: their contracts."""

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

__all__ = [
    "Marks",
    "RawRingView",
    "RingView",
    "Windows",
    "check_raw_ring",
    "check_raw_ring_shapes",
    "check_ring",
    "check_ring_shapes",
    "check_window",
    "raw_ring_tensors",
    "ring_tensors",
]


class RingView(NamedTuple):
    """Ring of one layer, and the cursors that all layers of a request share.

    Live rows of slot s are (ring_start[s] + j) mod R for j < history_len[s].

    Attributes:
        k: [S, H, R, K], normalised keys.
        u: [S, HV, R, V], corrected values.
        cum_log_decay: [S, HV, R], fp32, log-decay accumulated since the checkpoint.
        ring_start: [S], int32, contiguous. Of a call whose cursors belong to batch rows: [B], or
            None for windows that begin at row 0.
        history_len: [S], int32, contiguous; or [B] likewise.
        max_window: most live rows (W); R >= W + T.
        has_token_decay: whether cum_log_decay holds the log-decay of each token alone instead, as
            vLLM's rings do.
    """

    k: Written[Tensor]
    u: Written[Tensor]
    cum_log_decay: Written[Tensor]
    ring_start: Tensor | None
    history_len: Tensor
    max_window: int = 16
    has_token_decay: bool = False


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


class Windows(NamedTuple):
    """Cursors of the live windows, of slots [S] or of batch rows [B], int32.

    Attributes:
        ring_start: first live ring row; None where it does not matter.
        history_len: live ring rows.
    """

    ring_start: Written[Tensor | None]
    history_len: Written[Tensor]


class Marks(NamedTuple):
    """What a step says of its requests, [B].

    Attributes:
        slots: slot, -1 = padding, int32.
        is_fold: whether the step folds, int8.
        num_verify_tokens: rows of the step, int32.
    """

    slots: Tensor
    is_fold: Written[Tensor]
    num_verify_tokens: Written[Tensor]


def ring_tensors(ring: RingView) -> dict[str, Tensor | None]:
    """Name the tensors of a ring as messages do."""
    return {f"ring.{name}": getattr(ring, name) for name in ring._fields[:5]}


def check_ring_shapes(ring: RingView, dims: Dims, cursors: str = "S") -> None:
    """Raise unless the sizes of a ring fit together, with its cursors and those bound so far."""
    if not isinstance(ring, RingView):
        raise TypeError(f"ring: expected a RingView, got {type(ring).__name__}")
    check("ring.k", ring.k, "S H R K", dims)
    check("ring.u", ring.u, "S HV R V", dims)
    check("ring.cum_log_decay", ring.cum_log_decay, "S HV R", dims)
    if ring.ring_start is not None or cursors == "S":
        check("ring.ring_start", ring.ring_start, cursors, dims)
    check("ring.history_len", ring.history_len, cursors, dims)


def check_ring(ring: RingView, cursors: str = "S") -> None:
    """Raise unless the ring's dtypes and strides, its capacity and its cursors are right.

    Args:
        ring: the ring, whose shapes have been checked.
        cursors: "S" if there is one per slot, else "B".
    """
    check_dtype("ring.k", ring.k, *FLOATS)
    check_dtype("ring.u", ring.u, *FLOATS)
    check_dtype("ring.cum_log_decay", ring.cum_log_decay, *WIDE)
    check_last_stride("ring.k", ring.k)
    check_last_stride("ring.u", ring.u)
    for name, cursor in (("ring_start", ring.ring_start), ("history_len", ring.history_len)):
        if cursor is not None:
            check_dtype(f"ring.{name}", cursor, torch.int32)
            if cursors == "S":
                check_last_stride(f"ring.{name}", cursor)
    check_option("ring.max_window", ring.max_window, int)
    check_option("ring.has_token_decay", ring.has_token_decay, bool)
    capacity = ring.k.shape[2]
    is_flat = ring.ring_start is None  # windows begin at row 0, and nothing wraps around
    if not is_flat:
        _check_capacity(capacity)
    most = capacity if is_flat else capacity - 1
    if not 0 < ring.max_window <= most:
        raise ValueError(
            f"ring.max_window: expected 1..{most} (the ring has {capacity} rows), "
            f"got {ring.max_window}"
        )


def check_window(ring: RingView, max_verify_tokens: int) -> None:
    """Raise ValueError unless the ring holds a full window and the rows of a step."""
    check_option("max_verify_tokens", max_verify_tokens, int)
    capacity, window = ring.k.shape[2], ring.max_window
    if not 0 < max_verify_tokens <= window:
        raise ValueError(
            f"max_verify_tokens: expected 1..{window} (ring.max_window), got {max_verify_tokens}"
        )
    _check_room(capacity, window, max_verify_tokens)


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
    _check_capacity(ring.k.shape[2])
    _check_room(ring.k.shape[2], ring.max_window, max_verify_tokens)


def _check_capacity(capacity: int) -> None:
    if capacity & (capacity - 1):
        raise ValueError(f"ring.k: expected a power of two as ring capacity, got {capacity}")


def _check_room(capacity: int, window: int, max_verify_tokens: int) -> None:
    needed = window + max_verify_tokens
    if needed > capacity:
        raise ValueError(
            f"max_verify_tokens: a window of {window} rows and {max_verify_tokens} more need "
            f"{needed} ring rows, got {capacity}; use a larger ring"
        )
