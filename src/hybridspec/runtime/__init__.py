"""Slots, pools, cursors and pages: the memories of the running requests."""

from __future__ import annotations

from hybridspec.runtime.host_memory import available_host_bytes
from hybridspec.runtime.memory import GdnMemory, KvMemory, MemoryOptions, MemorySpec, MemorySpecs
from hybridspec.runtime.pools import Pools
from hybridspec.runtime.prefixes import Prefix, Prefixes, prefix_keys
from hybridspec.runtime.sampling_table import SamplingPool
from hybridspec.runtime.slot_options import SlotOptions
from hybridspec.runtime.slots import Allocator
from hybridspec.runtime.upload import to_device, upload_parts

__all__ = [
    "Allocator",
    "GdnMemory",
    "KvMemory",
    "MemoryOptions",
    "MemorySpec",
    "MemorySpecs",
    "Pools",
    "Prefix",
    "Prefixes",
    "SamplingPool",
    "SlotOptions",
    "available_host_bytes",
    "prefix_keys",
    "to_device",
    "upload_parts",
]
