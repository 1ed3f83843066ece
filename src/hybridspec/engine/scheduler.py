"""Which requests wait, which are being prefilled and which decode.

First come, first served. A request is admitted when a slot and the pages of its prompt are free,
and takes pages as it grows. Where they run out, the request that came last is preempted: it gives
up what it has and waits, in front of all others that wait, to be computed anew. So the one that
came first always finishes.

A prompt begins with the longest prefix that is kept of others; where one in progress will bring a
longer one, it waits for that.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence

import torch

from hybridspec.engine.prompt_graphs import CAPTURED_CHUNK, CHUNK_BESIDE
from hybridspec.engine.request import Request
from hybridspec.engine.runner import Runner
from hybridspec.runtime import Allocator, GdnMemory, prefix_keys

__all__ = ["Scheduler"]


# Prompt rows of one request per forward that is not captured, and of all requests beside a decode
# step, which waits for them. On a GPU the host takes 50 ms to launch such a forward of a model of
# 7 B, as long as an H200 takes for these rows: fewer would gain nothing.
PROMPT_CHUNKS = {"cpu": 512, "cuda": 2048}
_MOST_COMPARED = 65  # requests in front of the queue whose prompts are looked at


class Scheduler:
    """Queues of requests over slots and pages.

    Args:
        allocator: gives them out.
        runner: is told who gets a slot and who leaves it.
        max_prompt_rows: prompt rows of all requests per forward.
        is_bitwise: whether a prefill is cut nowhere else than where chunks end, and what a
            preempted request had said is decoded again, not prefilled: else bits would differ.

    Attributes:
        max_chunk: prompt rows of one request per forward where nobody decodes; a multiple of the
            next.
        chunk_beside: prompt rows of all requests beside those who decode, and wait for them.
        keeps_last_border: whether a prefill is cut at the last border of a page that leaves a row;
            if not, it is cut where prompts that wait part from it.
    """

    def __init__(
        self,
        allocator: Allocator,
        runner: Runner,
        *,
        max_prompt_rows: int,
        is_bitwise: bool = False,
    ) -> None:
        self.allocator = allocator
        self.runner = runner
        self._admissions = itertools.count()
        self._arrivals = itertools.count()
        self._unwritten: list[Request] = []  # have a slot that the device does not know of yet
        self.max_prompt_rows = max_prompt_rows
        device = allocator.pools.device.type
        chunk = beside = PROMPT_CHUNKS[device]
        if runner.prompts is not None:
            # States that are rounded where a chunk ends must not depend on who decodes; others have
            # the same bits in either case.
            memories = allocator.pools.of_kind(GdnMemory)
            is_rounded = any(memory.state.dtype != torch.float32 for memory in memories)
            chunk, beside = CHUNK_BESIDE if is_rounded else CAPTURED_CHUNK, CHUNK_BESIDE
        self.chunk_beside = min(beside, max_prompt_rows)
        rows = min(chunk, max_prompt_rows)
        self.max_chunk = rows - rows % self.chunk_beside
        self.keeps_last_border = device == "cpu"
        self.is_bitwise = is_bitwise
        self.page_size = allocator.pools.page_size
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, request: Request) -> None:
        """Queue a request behind all others."""
        request.arrival = next(self._arrivals)
        self.waiting.append(request)

    def admit(self) -> None:
        """Move waiting requests to prefill, in order, as long as they fit; drop what cannot.

        Where it fails, those that it moved wait again: their slots may be written by half.
        """
        try:
            self._give_slots()
            if new := self._unwritten:
                self.allocator.prepare([slot for one in new if (slot := one.slot) is not None])
                self.runner.write(new)
        except BaseException:
            for request in reversed(self._unwritten):
                self.remove(request)
                self.waiting.appendleft(request)
            raise
        finally:
            self._unwritten.clear()

    def _give_slots(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            try:
                if not self._place(request):
                    return
            except Exception as error:  # its caller is told; whoever runs this step is not
                self.waiting.popleft()
                self._fail(request, error)
                continue
            self.waiting.popleft()
            request.admitted_at = time.perf_counter()
            self.runner.counters.num_admitted += 1
            self.prefilling.append(request)
            self._unwritten.append(request)

    def _place(self, request: Request) -> bool:
        """Give a request its room; returns whether there is any. An error leaves none taken."""
        if request.prefill_end != request.num_to_prefill:
            self._plan_prefill(request)
        prefixes, keys = self.allocator.prefixes, request.prefix_keys
        if request.params.prompt_logprobs is not None:
            if request.index == 0:
                keys = []  # its rows are reported on
            elif request.group.lacks_prompt_reports:
                return False  # a prefix could let it overtake them
        if prefixes.is_expected(keys):
            return False
        prefix = prefixes.find(keys)
        # The prefill brings a token and drafts; who is there already can take a page before that.
        most_drafts = self.runner.decoder.requests.most_drafts
        tokens = min(request.num_tokens + most_drafts + 1, request.max_tokens_in_logs)
        growing = sum(one.room < one.max_tokens_in_logs for one in self._live)
        slot = self.allocator.acquire(tokens, prefix=prefix, num_spare=growing)
        if slot is None:
            return False
        request.slot, request.admission = slot, next(self._admissions)
        request.room = self.allocator.room_of(slot)
        request.num_prefilled = 0 if prefix is None else len(prefix.pages) * self.page_size
        has_room = False
        try:
            has_room = self.runner.admit(request)
        finally:
            if not has_room:
                request.slot = None
                self.allocator.release(slot)
        if has_room:
            self._expect_prefixes(request, slot)
        return has_room

    def _plan_prefill(self, request: Request) -> None:
        request.prefill_end, request.prefix_keys = request.num_to_prefill, []
        if self.allocator.prefixes.num_states:
            tokens = request.history[: request.prefill_end]
            request.prefix_keys = prefix_keys(tokens, self.page_size)

    def _partings(self, request: Request) -> list[int]:
        """Return the page borders, two at most, up to which most of those that wait are like it."""
        keys, counts = request.prefix_keys, Counter[int]()
        for other in itertools.islice(self.waiting, 1, _MOST_COMPARED) if keys else ():
            if other.prefill_end != other.num_to_prefill:
                self._plan_prefill(other)
            counts[_num_common(keys, other.prefix_keys)] += 1
        del counts[0]
        return sorted(count * self.page_size for count, _ in counts.most_common(2))

    def _expect_prefixes(self, request: Request, slot: int) -> None:
        """Note which prefixes a prefill will bring; who begins alike waits for them."""
        counters, begin, size = self.runner.counters, request.num_prefilled, self.page_size
        counters.prefix_queries += request.prefill_end if request.prefix_keys else 0
        counters.prefix_hits += begin
        last = len(request.prefix_keys) * size
        if not self.is_bitwise:
            request.cuts = [last] if self.keeps_last_border else self._partings(request)
        ends = range(begin - begin % self.max_chunk, request.prefill_end, self.max_chunk)
        borders = {*ends, *request.cuts}
        keys = [
            request.prefix_keys[end // size - 1]
            for end in sorted(borders)
            if begin < end <= len(request.prefix_keys) * size and end % size == 0
        ]
        self.allocator.prefixes.expect(keys, slot)

    def keep_prefixes(self, chunks: Sequence[tuple[Request, int]]) -> None:
        """Keep the states at the borders of pages that some prefills have just reached."""
        size, borders = self.page_size, []
        for request, _ in chunks:
            count, rest = divmod(request.num_prefilled, size)
            if request.slot is not None and rest == 0 and count <= len(request.prefix_keys):
                borders.append(
                    (request.slot, request.num_prefilled, request.prefix_keys[count - 1])
                )
        self.allocator.keep(borders)
        self.runner.fit_tables()

    @property
    def _live(self) -> list[Request]:
        """Requests that have a slot."""
        return [*self.prefilling, *self.running]

    def grow(self, num_steps: int) -> None:
        """Give running requests the pages that steps can need, or preempt those that came last.

        Args:
            num_steps: steps that may run before the host knows what they brought.
        """
        most_drafts = self.runner.decoder.requests.most_drafts
        # Each step can commit k + 1 tokens, and a prefill before them the first one; behind the
        # last one the drafter looks ahead.
        ahead = 1 + num_steps * (most_drafts + 1) + most_drafts
        short = [
            one for one in self.running
            if one.room < len(one.history) + ahead and one.room < one.max_tokens_in_logs
        ]  # fmt: skip
        for request in sorted(short, key=_by_arrival):
            tokens = min(request.num_tokens + ahead, request.max_tokens_in_logs)
            while request.slot is not None and not self._extend(request, request.slot, tokens):
                last = max(self._live, key=_by_arrival)
                if last is not request or len(self._live) > 1:
                    self._set_back(last)
                else:
                    self.remove(request)
                    self._fail(request, self.allocator.too_large(tokens))

    def _extend(self, request: Request, slot: int, tokens: int) -> bool:
        """Give a request more pages; returns whether there are any."""
        has_room = self.allocator.extend(slot, tokens)
        request.room = self.allocator.room_of(slot)
        return has_room

    def _set_back(self, request: Request) -> None:
        """Let a request begin anew, before all that wait; what is in flight for it is dropped."""
        self.remove(request)
        request.admission = -1
        if self.is_bitwise:
            request.num_replayed = request.num_generated
        request.stats.preemptions += 1
        self.runner.counters.num_preemptions += 1
        self.waiting.appendleft(request)

    def _fail(self, request: Request, error: Exception) -> None:
        request.finish_reason, request.failure = "abort", error
        self.runner.counters.num_aborted += 1

    def prefill_chunks(self) -> list[tuple[Request, int]]:
        """The requests whose prompts go on now, in order, and how many rows of each.

        Chunks end at multiples of `max_chunk`, beside those who decode at multiples of
        `chunk_beside`, and where a request is cut to keep its states for others.
        """
        chunks = []
        size = self.chunk_beside if self.running else self.max_chunk
        budget = size if self.running else self.max_prompt_rows
        for request in self.prefilling:
            first = request.num_prefilled
            borders = [first - first % size + size, *request.cuts]
            ends = [end for end in borders if first < end < request.prefill_end]
            rows = min(ends, default=request.prefill_end) - first
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
                if request.num_prefilled < request.prefill_end:
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


def _by_arrival(request: Request) -> int:
    return request.arrival


def _num_common(keys: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Return how many prefixes two requests share: where a key differs, so do all behind it."""
    if not others or keys[0] != others[0]:
        return 0  # most of them
    shorter = range(min(len(keys), len(others)))
    return bisect_left(shorter, True, key=lambda i: keys[i] != others[i])
