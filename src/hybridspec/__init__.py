"""Exact speculative decoding for hybrid language models, in which a rejected draft costs nothing."""

from __future__ import annotations

__version__ = "0.1.0"
