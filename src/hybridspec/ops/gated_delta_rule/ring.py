"""The frozen view under which the ring tensors of one layer travel together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["RingView"]


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
