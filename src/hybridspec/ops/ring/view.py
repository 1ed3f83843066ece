"""The frozen view under which the ring tensors of one layer travel together, and its contract."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec.ops._checks import Dims, check, check_dtype, check_last_stride, check_option

__all__ = ["RingView", "check_ring", "check_ring_shapes", "check_window", "ring_tensors"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingView:
    """Ring of one layer, and the cursors that all layers of a request share.

    Live rows of slot s are (ring_start[s] + j) mod R for j < history_len[s].

    Attributes:
        k: [S, H, R, K], normalised keys.
        u: [S, HV, R, V], corrected values.
        cum_log_decay: [S, HV, R], fp32, log-decay accumulated since the checkpoint.
        ring_start: [S], int32, contiguous.
        history_len: [S], int32, contiguous.
        max_window: most live rows (W); R >= W + T.
    """

    k: Tensor
    u: Tensor
    cum_log_decay: Tensor
    ring_start: Tensor
    history_len: Tensor
    max_window: int = 16


def ring_tensors(ring: RingView) -> dict[str, Tensor]:
    """Name the tensors of a ring as messages do."""
    return {
        "ring.k": ring.k,
        "ring.u": ring.u,
        "ring.cum_log_decay": ring.cum_log_decay,
        "ring.ring_start": ring.ring_start,
        "ring.history_len": ring.history_len,
    }


def check_ring_shapes(ring: RingView, dims: Dims, num_cursors: int | None = None) -> None:
    """Raise unless the sizes of a ring fit together, with its cursors and those bound so far."""
    if not isinstance(ring, RingView):
        raise TypeError(f"ring: expected a RingView, got {type(ring).__name__}")
    cursors = "S" if num_cursors is None else str(num_cursors)
    check("ring.k", ring.k, "S H R K", dims)
    check("ring.u", ring.u, "S HV R V", dims)
    check("ring.cum_log_decay", ring.cum_log_decay, "S HV R", dims)
    check("ring.ring_start", ring.ring_start, cursors, dims)
    check("ring.history_len", ring.history_len, cursors, dims)


def check_ring(ring: RingView, num_cursors: int | None = None) -> None:
    """Raise unless the ring's dtypes and strides, its capacity and its cursors are right.

    Args:
        ring: the ring.
        num_cursors: how many cursors there are; None: one per slot.
    """
    k, u, cum = ring.k, ring.u, ring.cum_log_decay
    capacity = k.shape[2]
    cursors = (k.shape[0] if num_cursors is None else num_cursors,)
    is_right = (
        k.dtype in _FLOATS
        and u.dtype in _FLOATS
        and cum.dtype in _WIDE
        and k.stride(-1) == 1
        and u.stride(-1) == 1
        and ring.ring_start.dtype == torch.int32
        and ring.history_len.dtype == torch.int32
        and ring.ring_start.shape == cursors
        and ring.history_len.shape == cursors
        and (num_cursors is not None or ring.ring_start.is_contiguous())
        and (num_cursors is not None or ring.history_len.is_contiguous())
        and capacity & (capacity - 1) == 0
        and isinstance(ring.max_window, int)
        and 0 < ring.max_window < capacity
    )
    if is_right:
        return
    check_ring_shapes(ring, {}, num_cursors)
    check_dtype("ring.k", k, *_FLOATS)
    check_dtype("ring.u", u, *_FLOATS)
    check_dtype("ring.cum_log_decay", cum, *_WIDE)
    check_last_stride("ring.k", k)
    check_last_stride("ring.u", u)
    check_dtype("ring.ring_start", ring.ring_start, torch.int32)
    check_dtype("ring.history_len", ring.history_len, torch.int32)
    if num_cursors is None:
        check_last_stride("ring.ring_start", ring.ring_start)
        check_last_stride("ring.history_len", ring.history_len)
    check_option("ring.max_window", ring.max_window, int)
    if capacity & (capacity - 1):
        raise ValueError(f"ring.k: expected a power of two as ring capacity, got {capacity}")
    if not 0 < ring.max_window < capacity:
        raise ValueError(
            f"ring.max_window: expected 1..{capacity - 1} (the ring has {capacity} rows), "
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
    if window + max_verify_tokens > capacity:
        raise ValueError(
            f"max_verify_tokens: a window of {window} rows and {max_verify_tokens} more need "
            f"{window + max_verify_tokens} ring rows, got {capacity}; use a larger ring"
        )
