"""A user's mistake: one line on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["UsageError", "usage_errors"]


class UsageError(ValueError):
    """A command line that cannot be carried out."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn ValueError, which says that a caller's value is wrong, into UsageError.

    Only calls that check what the user gave are put under it: elsewhere a ValueError is a bug, and
    its traceback is wanted.
    """
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error
