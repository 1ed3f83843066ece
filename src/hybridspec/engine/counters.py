"""What an engine holds and has done, as plain numbers in one object."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Counters"]


@dataclass(slots=True, kw_only=True)
class Counters:
    """What an engine holds now, and what it has done since it began.

    The engine adds to one object; `LLM.counters` hands out copies, which cost a few microseconds.
    A request is one continuation. What a step brought for a request that had ended is not counted.

    Attributes:
        num_waiting, num_prefilling, num_running: requests now, by where they stand.
        num_admitted: requests that were given a slot, each admission counting.
        num_ended: requests that came to their end; num_aborted: that were dropped before it.
        num_preemptions: requests that were preempted because pages ran out.
        prompt_tokens: tokens of prompts that were processed or reused, each prompt counting once.
        prompt_rows: rows of prefill forwards, what is computed anew after a preemption included.
        generated_tokens: tokens that requests took in.
        prefix_queries: prompt tokens looked up for reuse; prefix_hits: those that were reused.
        num_prefills: prefill forwards; num_steps: decode steps.
        outcomes: [k + 1][k + 1], verify steps of single requests by the drafts that they verified
            and how many of them were right.
        folds: verify steps of single requests that folded.
        slots_used, num_slots: slots of running requests, and slots for them.
        pages_used, num_pages: pages of running requests, and all pages.
        states_used, num_states: states kept for reuse, and most of them.
        seconds: of the host in each part of a step: "admit", "prefill" and "decode" launch, on a
            CPU they compute; "collect" waits for results and hands them out.
    """

    num_waiting: int = 0
    num_prefilling: int = 0
    num_running: int = 0
    num_admitted: int = 0
    num_ended: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    prompt_rows: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_prefills: int = 0
    num_steps: int = 0
    outcomes: list[list[int]] = field(default_factory=lambda: [[0]])
    folds: int = 0
    slots_used: int = 0
    num_slots: int = 0
    pages_used: int = 0
    num_pages: int = 0
    states_used: int = 0
    num_states: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"admit": 0.0, "prefill": 0.0, "decode": 0.0, "collect": 0.0}
    )

    @classmethod
    def create(cls, most_drafts: int) -> Counters:
        """Begin to count, for steps of at most so many drafts of a request."""
        return cls(outcomes=[[0] * (most_drafts + 1) for _ in range(most_drafts + 1)])

    @property
    def verify_steps(self) -> int:
        """Verify steps of single requests."""
        return sum(map(sum, self.outcomes))

    @property
    def draft_steps(self) -> int:
        """Verify steps of single requests that had drafts."""
        return sum(map(sum, self.outcomes[1:]))

    @property
    def drafted_by_position(self) -> list[int]:
        """Drafts verified at each position, the first one first."""
        sums = [sum(row) for row in self.outcomes]
        return [sum(sums[j:]) for j in range(1, len(sums))]

    @property
    def accepted_by_position(self) -> list[int]:
        """Drafts accepted at each position, the first one first."""
        sums = [sum(column) for column in zip(*self.outcomes, strict=True)]
        return [sum(sums[j:]) for j in range(1, len(sums))]

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of a block to a part of a step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - started

    def copy(self, **now: Any) -> Counters:
        """Return a copy with some attributes as they are now."""
        other = copy.copy(self)
        other.outcomes = [row.copy() for row in self.outcomes]
        other.seconds = self.seconds.copy()
        for name, value in now.items():
            setattr(other, name, value)
        return other
