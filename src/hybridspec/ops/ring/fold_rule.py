"""When the first window of a request is folded: earlier than it must, by slot.

Requests that are admitted together fill their windows together. Folding the first one early, at a
length that differs from slot to slot, gives each request a phase, which it keeps from then on.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

__all__ = ["PERIOD", "STEP", "first_fold_length"]

# STEP / PERIOD is the golden ratio: its multiples, mod 1, lie evenly however many slots there are.
STEP, PERIOD = 633, 1024

Slots = TypeVar("Slots", int, Tensor)


def first_fold_length(slots: Slots, max_window: int) -> Slots:
    """Live rows from which on a slot's first window is folded: 1 to W, and W for slot 0.

    W - floor(W frac(633 slot / 1024))

    Source:
        Three-distance theorem: Sos, On the distribution mod 1 of the sequence n alpha (1958).
    """
    return max_window - slots * STEP % PERIOD * max_window // PERIOD
