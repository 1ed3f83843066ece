"""Keeps torch's autocast out of functions that name their own dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["without_autocast"]

P = ParamSpec("P")
T = TypeVar("T")


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function as if its caller had not entered `torch.autocast`."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return run
