"""Gated delta rule over a checkpointed state and a ring of corrections."""

from __future__ import annotations

from hybridspec.ops.gated_delta_rule.api import (
    explain_prefill,
    explain_verify,
    fold,
    materialize,
    prefill,
    verify,
)
from hybridspec.ops.gated_delta_rule.blocks import verify_blocks
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.one_token import decode
from hybridspec.ops.gated_delta_rule.prefix import materialize_rows
from hybridspec.ops.gated_delta_rule.raw import explain_verify_raw, verify_raw, verify_raw_rows
from hybridspec.ops.gated_delta_rule.row_cursors import verify_rows

__all__ = [
    "FoldingBatch",
    "Gates",
    "Rows",
    "State",
    "decode",
    "explain_prefill",
    "explain_verify",
    "explain_verify_raw",
    "fold",
    "materialize",
    "materialize_rows",
    "prefill",
    "verify",
    "verify_blocks",
    "verify_raw",
    "verify_raw_rows",
    "verify_rows",
]
