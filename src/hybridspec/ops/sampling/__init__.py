"""Sampling whose result does not depend on the drafter: counter-based noise, and the best score."""

from __future__ import annotations

from .choose import NO_TOKEN, choose, explain_choose
from .gumbel import gumbel_noise, philox
from .table import COUNT_MASK, IN_PROMPT, SamplingTable, SamplingUses

__all__ = [
    "COUNT_MASK",
    "IN_PROMPT",
    "NO_TOKEN",
    "SamplingTable",
    "SamplingUses",
    "choose",
    "explain_choose",
    "gumbel_noise",
    "philox",
]
