"""Causal attention over key/value pages that are read in place through a page table."""

from hybridspec.ops._requests import Batch
from hybridspec.ops.paged_attention.api import explain_prefill, explain_verify, prefill, verify
from hybridspec.ops.paged_attention.call import Pages, Rows

__all__ = [
    "Batch",
    "Pages",
    "Rows",
    "explain_prefill",
    "explain_verify",
    "prefill",
    "verify",
]
