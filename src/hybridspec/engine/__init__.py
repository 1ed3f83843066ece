"""Continuous batching over the speculative decoding method."""

from __future__ import annotations

from hybridspec.engine.counters import Counters
from hybridspec.engine.info import EngineInfo
from hybridspec.engine.llm import LLM
from hybridspec.engine.outputs import CompletionOutput, RequestOutput, RequestStats, StepOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "Counters",
    "EngineInfo",
    "RequestOutput",
    "RequestStats",
    "StepOutput",
]
