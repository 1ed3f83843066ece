"""The package's own error types; wrong calls raise ValueError or TypeError."""

from __future__ import annotations

__all__ = ["CapacityError", "CheckpointError", "UnsupportedError", "missing_package", "visible"]

_MAX_CHARACTERS = 1000  # of a message
# Packages that an installation may lack, by the extra that brings them.
_EXTRAS = {
    "engine": {"huggingface_hub", "jinja2", "rich", "safetensors", "tokenizers", "torch"},
    "serve": {"prometheus_client", "pydantic", "starlette", "uvicorn"},
    "cluster": {"ray"},
}


def missing_package(error: ModuleNotFoundError) -> tuple[str, str] | None:
    """Return the package that an import lacks and the extra that brings it; None: no extra does."""
    package = (error.name or "").partition(".")[0]
    return next(((package, extra) for extra, those in _EXTRAS.items() if package in those), None)


def visible(text: str) -> str:
    """Return text in one line of bounded length, whatever is no printable character escaped.

    Messages quote files that others made, and an escape sequence in one would act on the terminal.
    """
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode()
            for char in text[:_MAX_CHARACTERS]
        )
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."


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
