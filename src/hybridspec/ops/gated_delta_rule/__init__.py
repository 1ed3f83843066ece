"""Gated delta rule over a checkpointed state and a ring of corrections."""

from __future__ import annotations

from hybridspec.ops.gated_delta_rule.api import fold, materialize, prefill, verify
from hybridspec.ops.gated_delta_rule.by_row import verify_rows
from hybridspec.ops.gated_delta_rule.choice import verify_backends

__all__ = ["fold", "materialize", "prefill", "verify", "verify_backends", "verify_rows"]
