"""Independence of torch's defaults, and refusal of use in a forked process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

__all__ = ["ProcessGuard", "torch_defaults"]


@contextlib.contextmanager
def torch_defaults() -> Iterator[None]:
    """Run in inference mode, without autocast and without the default device of the thread.

    Other threads are not touched. The default dtype is one for all threads, so it is not set here:
    whatever makes a tensor names its dtype.
    """
    with contextlib.ExitStack() as stack:
        # Views of tensors that were made in inference mode cost less.
        stack.enter_context(torch.inference_mode())
        # A default device is a mode that puts itself into the arguments of functions.
        stack.enter_context(torch._C.DisableTorchFunction())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class ProcessGuard:
    """Refuses the use of an engine in a forked child.

    A fork takes along neither torch's worker threads nor whoever holds the engine's lock, so a
    child that uses the engine would wait for them for ever.
    """

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is another process than the one that the guard was made in."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raise RuntimeError in any other process than the one that the guard was made in."""
        if self.is_forked:
            raise RuntimeError(
                f"this engine was made in process {self._process} and cannot be used in "
                f"{os.getpid()}, which was forked from it: make one in each process, and start "
                f"processes with multiprocessing's 'spawn' or 'forkserver' method"
            )
