"""Sampling whose result does not depend on the drafter: counter-based noise, argmax, acceptance."""

from __future__ import annotations

from .acceptance import accept_drafts, rejection_sample
from .gumbel import gumbel_noise, philox
from .selection import process_logits, sample

__all__ = [
    "accept_drafts",
    "gumbel_noise",
    "philox",
    "process_logits",
    "rejection_sample",
    "sample",
]
