"""The engine's work does not depend on what a caller has set in torch for all that follows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from hybridspec.ops._autocast import without_autocast

__all__ = ["isolated"]

P = ParamSpec("P")
T = TypeVar("T")


def isolated(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function in inference mode, without autocast and without a default device.

    A device is named only where the caller has, as every torch call inside pays for that.
    A default dtype belongs to the process, so tensors name theirs instead.
    """

    @functools.wraps(function)
    @torch.inference_mode()
    @without_autocast
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.get_default_device().type == "cpu":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run
