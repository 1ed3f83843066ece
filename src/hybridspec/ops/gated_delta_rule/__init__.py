"""Gated delta rule over a checkpointed state and a ring of corrections."""

from __future__ import annotations

from hybridspec.ops.gated_delta_rule.api import fold, materialize, prefill, verify
from hybridspec.ops.gated_delta_rule.by_row import verify_rows
from hybridspec.ops.gated_delta_rule.choice import verify_backends
from hybridspec.ops.gated_delta_rule.restart import restart_windows
from hybridspec.ops.gated_delta_rule.ring import RingView
from hybridspec.ops.gated_delta_rule.slots import commit, copy_slots, decide_folds, reset_slots

__all__ = [
    "RingView",
    "commit",
    "copy_slots",
    "decide_folds",
    "fold",
    "materialize",
    "prefill",
    "reset_slots",
    "restart_windows",
    "verify",
    "verify_backends",
    "verify_rows",
]
