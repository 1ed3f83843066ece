"""A stretch of work that must not wait for a CUDA device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["no_sync"]


@contextmanager
def no_sync() -> Iterator[None]:
    """Raise where torch waits for the device; what it says about this mode itself is ignored."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
