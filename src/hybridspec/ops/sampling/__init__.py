"""Sampling whose result does not depend on the drafter: counter-based noise, argmax, acceptance."""

from __future__ import annotations

from .acceptance import accept_drafts
from .choose import NO_TOKEN, choose
from .gumbel import gumbel_noise, philox
from .report import NUM_REPORTED, LogprobColumns, report
from .selection import process_logits, sample
from .table import (
    COUNT_MASK,
    IN_PROMPT,
    SamplingTable,
    SamplingUses,
    count_tokens,
    is_end,
)

__all__ = [
    "COUNT_MASK",
    "IN_PROMPT",
    "NO_TOKEN",
    "NUM_REPORTED",
    "LogprobColumns",
    "SamplingTable",
    "SamplingUses",
    "accept_drafts",
    "choose",
    "count_tokens",
    "gumbel_noise",
    "is_end",
    "philox",
    "process_logits",
    "report",
    "sample",
]
