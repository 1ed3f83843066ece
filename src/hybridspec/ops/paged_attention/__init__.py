"""Causal attention over key/value pages that are read in place through a page table."""

from hybridspec.ops.paged_attention.api import (
    prefill,
    prefill_backends,
    verify,
    verify_backends,
)

__all__ = ["prefill", "prefill_backends", "verify", "verify_backends"]
