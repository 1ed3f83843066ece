"""Slots, pools, cursors and pages: the memories of the running requests."""

from __future__ import annotations

from hybridspec.runtime.memory import GdnMemory, KvMemory, MemoryOptions, MemorySpec, MemorySpecs
from hybridspec.runtime.pools import Pools
from hybridspec.runtime.slots import Allocator

__all__ = [
    "Allocator",
    "GdnMemory",
    "KvMemory",
    "MemoryOptions",
    "MemorySpec",
    "MemorySpecs",
    "Pools",
]
