"""Gated delta rule over a checkpointed state and a ring of corrections."""

from __future__ import annotations

from hybridspec.ops.gated_delta_rule.api import (
    explain_verify,
    fold,
    materialize,
    prefill,
    verify,
)
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.row_cursors import verify_rows

__all__ = [
    "FoldingBatch",
    "Gates",
    "Rows",
    "State",
    "explain_verify",
    "fold",
    "materialize",
    "prefill",
    "verify",
    "verify_rows",
]
