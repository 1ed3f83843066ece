"""Causal attention over key/value pages that are read in place through a page table."""

from hybridspec.ops.paged_attention.api import prefill, verify

__all__ = ["prefill", "verify"]
