"""Errors as callers of another project's functions expect them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["CallerError", "renamed"]


class CallerError(ValueError, AssertionError):
    """A wrong call. FlashInfer asserts most of its contract and raises ValueError for the rest."""


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Raise an op's complaints about a call again, with other names for its arguments."""
    try:
        yield
    except (TypeError, ValueError) as error:
        name, colon, rest = str(error).partition(":")
        raise CallerError(f"{names.get(name, name)}{colon}{rest}") from error
