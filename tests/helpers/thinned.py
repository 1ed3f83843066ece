"""Combinations of which `make test` runs those that show each value, `make test-full` all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["thinned"]


def thinned(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return all pairs as parameters; most are `slow`.

    The last of `first` meets every one of `second`, the others one each, in turn.
    """
    return [
        pytest.param(
            one,
            other,
            id=f"{getattr(one, 'name', one)}-{other}",
            marks=() if one is first[-1] or i % len(second) == j else pytest.mark.slow,
        )
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]
