"""What a step commits: accepted drafts and one token more, cut at the first end."""

from __future__ import annotations

from hybridspec.ops.accept.api import accept_rows
from hybridspec.ops.accept.table import RequestTable, StepResult, Taken, TokenLog

__all__ = ["RequestTable", "StepResult", "Taken", "TokenLog", "accept_rows"]
