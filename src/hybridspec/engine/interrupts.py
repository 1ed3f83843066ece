"""Ctrl-C waits for the end of a step, so that it harms no other caller's request."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupts_wait"]


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Put off SIGINT until the block is done; a second one comes through at once.

    Python runs handlers in the main thread only: in others, and where SIGINT is ignored or left to
    the system, nothing is changed.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    waiting: list[FrameType | None] = []

    def put_off(number: int, frame: FrameType | None) -> None:
        if waiting:
            signal.signal(signal.SIGINT, handler)
            handler(number, frame)
        waiting.append(frame)

    signal.signal(signal.SIGINT, put_off)
    try:
        yield
    finally:
        # Whoever set another handler meanwhile keeps it.
        if signal.getsignal(signal.SIGINT) is put_off:
            signal.signal(signal.SIGINT, handler)
        if len(waiting) == 1:
            handler(signal.SIGINT, waiting[0])
