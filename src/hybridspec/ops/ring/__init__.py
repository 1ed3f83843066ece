"""The ring of a recurrent layer: its view, the decision to fold, and every writer of a cursor."""

from __future__ import annotations

from hybridspec.ops.ring.block_cursors import commit_blocks, reset_blocks
from hybridspec.ops.ring.copies import copy_slots, reset_slots
from hybridspec.ops.ring.cursors import advance, commit, decide_folds, restart_windows
from hybridspec.ops.ring.view import RawRingView, RingView

__all__ = [
    "RawRingView",
    "RingView",
    "advance",
    "commit",
    "commit_blocks",
    "copy_slots",
    "decide_folds",
    "reset_blocks",
    "reset_slots",
    "restart_windows",
]
