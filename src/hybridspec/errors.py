"""The package's own error types; wrong calls raise ValueError or TypeError."""

from __future__ import annotations

__all__ = ["CapacityError", "CheckpointError", "UnsupportedError"]


class UnsupportedError(NotImplementedError):
    """A correct call that no available backend, or no implemented option, can serve."""


class CapacityError(RuntimeError):
    """A pool (slots, pages, memory) is full and cannot grow."""


class CheckpointError(ValueError):
    """A model folder that cannot be read or does not hold what its config says."""
