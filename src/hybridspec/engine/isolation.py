"""The engine's work does not depend on what a caller has set in torch for all that follows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

import torch

__all__ = ["isolated"]

P = ParamSpec("P")
T = TypeVar("T")


def isolated(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function in inference mode, without autocast and without a default device.

    Both are entered only where the caller set them, as every torch call pays for a default device.
    A default dtype belongs to the process, so tensors name theirs instead.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            return function(*args, **kwargs)

    return run
