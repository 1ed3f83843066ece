"""Sampling whose result does not depend on the drafter: counter-based noise, and the best score."""

from __future__ import annotations

from hybridspec.ops.sampling.choose import NO_TOKEN, choose, explain_choose
from hybridspec.ops.sampling.gumbel import gumbel_noise, philox
from hybridspec.ops.sampling.table import COUNT_MASK, IN_PROMPT, SamplingTable, SamplingUses

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
