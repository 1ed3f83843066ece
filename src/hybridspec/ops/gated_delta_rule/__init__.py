"""Gated delta rule over a checkpointed state and a ring of corrections."""

from __future__ import annotations

from .api import fold, materialize, prefill, verify
from .ring import RingView
from .slots import commit, copy_slots, decide_folds, reset_slots

__all__ = [
    "RingView",
    "commit",
    "copy_slots",
    "decide_folds",
    "fold",
    "materialize",
    "prefill",
    "reset_slots",
    "verify",
]
