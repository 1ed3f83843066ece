"""Slots, pools, cursors and pages: the memories of the running requests."""

from __future__ import annotations

from hybridspec.runtime.pools import GdnPool, KvPool, PoolGeometry, Pools
from hybridspec.runtime.sampling_table import SamplingPool, SlotOptions
from hybridspec.runtime.slots import Allocator
from hybridspec.runtime.step import Step

__all__ = [
    "Allocator",
    "GdnPool",
    "KvPool",
    "PoolGeometry",
    "Pools",
    "SamplingPool",
    "SlotOptions",
    "Step",
]
