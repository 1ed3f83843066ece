"""The progress of long work, as one line on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

from hybridspec.engine.outputs import StepOutput

__all__ = ["show_progress"]

_EVERY_S = 0.2


def show_progress(steps: Iterable[StepOutput], num_continuations: int) -> Iterator[StepOutput]:
    """Pass steps on, and show on standard error, if that is a terminal, how far they are."""
    screen = sys.stderr
    if not screen.isatty():
        yield from steps
        return
    started = shown = time.perf_counter()
    num_done = num_tokens = 0
    try:
        for step in steps:
            num_done += step.finished
            num_tokens += len(step.token_ids)
            now = time.perf_counter()
            if now - shown >= _EVERY_S or num_done == num_continuations:
                shown, rate = now, num_tokens / max(now - started, 1e-9)
                line = f"{num_done} of {num_continuations} done, {rate:.0f} tokens/s"
                print(f"\r\x1b[K{line}", end="", file=screen, flush=True)
            yield step
    finally:
        print(file=screen, flush=True)
