"""Which requests wait, which are being prefilled and which decode.

First come, first served. A request is admitted when a slot and all its pages are free, so that
once running it always finishes.
"""

from __future__ import annotations

import itertools
import time
from collections import deque

from hybridspec.engine.request import Request
from hybridspec.engine.runner import Runner
from hybridspec.runtime import Allocator

__all__ = ["Scheduler"]


class Scheduler:
    """Queues of requests over slots and pages.

    Args:
        allocator: gives them out.
        runner: is told who gets a slot and who leaves it.
        max_prompt_rows: prompt rows of all requests per forward.
        max_chunk: prompt rows of one request per forward, and of all requests where some decode,
            which wait for them.
    """

    def __init__(
        self, allocator: Allocator, runner: Runner, *, max_prompt_rows: int, max_chunk: int
    ) -> None:
        self.allocator = allocator
        self.runner = runner
        self._admissions = itertools.count()
        self._unwritten: list[Request] = []  # have a slot that the device does not know of yet
        self.max_prompt_rows = max_prompt_rows
        self.max_chunk = min(max_chunk, max_prompt_rows)
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self) -> None:
        """Move waiting requests to prefill, in order, as long as they fit; drop what cannot."""
        self._give_slots()
        # One whose caller has gone meanwhile has no slot any more.
        new = [(one, slot) for one in self._unwritten if (slot := one.slot) is not None]
        if new:
            self.allocator.prepare([slot for _, slot in new])
            self.runner.write([(one, self.allocator.pages_of(slot)) for one, slot in new])
        self._unwritten.clear()

    def _give_slots(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            try:
                if not self._place(request):
                    return
            except Exception as error:  # its caller is told; whoever runs this step is not
                self.waiting.popleft()
                request.finish_reason, request.failure = "abort", error
                continue
            self.waiting.popleft()
            request.admitted_at = time.perf_counter()
            self.runner.counters.num_admitted += 1
            self.prefilling.append(request)
            self._unwritten.append(request)

    def _place(self, request: Request) -> bool:
        """Give a request its room, and say whether there is any; an error leaves none taken."""
        slot = self.allocator.acquire(request.max_tokens_in_logs)
        if slot is None:
            return False
        request.slot, request.admission = slot, next(self._admissions)
        has_room = False
        try:
            has_room = self.runner.admit(request)
        finally:
            if not has_room:
                request.slot = None
                self.allocator.release(slot)
        return has_room

    def prefill_chunks(self) -> list[tuple[Request, int]]:
        """The requests whose prompts go on now, in order, and how many rows of each.

        Chunks end at multiples of `max_chunk`, so they are the same whatever else is running.
        """
        chunks = []
        budget = self.max_chunk if self.running else self.max_prompt_rows
        for request in self.prefilling:
            first = request.num_prefilled
            border = first - first % self.max_chunk + self.max_chunk
            rows = min(len(request.prompt_token_ids), border) - first
            if rows > budget:
                break
            chunks.append((request, rows))
            budget -= rows
        return chunks

    def settle(self) -> None:
        """Move prefilled requests to decoding and let finished ones go."""
        if self.prefilling:
            still_prefilling = []
            for request in self.prefilling:
                if request.num_prefilled < len(request.prompt_token_ids):
                    still_prefilling.append(request)
                else:
                    self.running.append(request)
            self.prefilling = still_prefilling
        ended = [request for request in self.running if request.finish_reason is not None]
        if ended:
            self.running = [request for request in self.running if request.finish_reason is None]
            self.runner.counters.num_ended += len(ended)
        for request in ended:
            self._free(request)

    def remove(self, request: Request) -> None:
        """Take a request out of whichever queue holds it and free its slot."""
        for queue in (self.waiting, self.prefilling, self.running):
            if request in queue:
                queue.remove(request)
        self._free(request)

    def _free(self, request: Request) -> None:
        if request.slot is not None:
            self.runner.release(request.slot)
            self.allocator.release(request.slot)
            request.slot = None
