"""The package's own error types; wrong calls raise ValueError or TypeError."""

from __future__ import annotations

__all__ = ["CapacityError", "CheckpointError", "UnsupportedError", "visible"]


def visible(text: str) -> str:
    """Return text in one line, with whatever is no printable character escaped.

    Messages quote files that others made, and an escape sequence in one would act on the terminal.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class UnsupportedError(NotImplementedError):
    """A correct call that no available backend, or no implemented option, can serve."""

    def __init__(self, message: str = "") -> None:
        super().__init__(visible(message))


class CapacityError(RuntimeError):
    """A pool (slots, pages, memory) is full and cannot grow."""


class CheckpointError(ValueError):
    """A model folder that cannot be read or does not hold what its config says."""

    def __init__(self, message: str = "") -> None:
        super().__init__(visible(message))
