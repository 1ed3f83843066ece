"""The thread that owns the engine: it steps, and hands what steps bring to the event loop.

Handlers submit and drop without waiting for a step; the event loop learns of all outputs of a step
through one call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from hybridspec.engine import LLM, StepOutput
from hybridspec.engine.request import Request
from hybridspec.errors import CapacityError
from hybridspec.serve.errors import ApiError, wrong_call

__all__ = ["Stepper", "Stream"]

_log = logging.getLogger("hybridspec.serve")
_MOST_FAILED = 3  # steps that fail one after the other; then all that waits is given up too


class Stream:
    """What comes back for some requests of one client, in order, on the event loop.

    Attributes:
        requests: the first continuation of each prompt.
        submitted_at: when they were, by `time.perf_counter`.
        is_gone: whether its client has gone.
    """

    def __init__(self, stepper: Stepper, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.submitted_at = time.perf_counter()
        self.is_gone = False
        # By prompt and continuation, for statistics.
        self.first_at: dict[tuple[int, int], float] = {}
        self.last_at: dict[tuple[int, int], float] = {}
        self._stepper = stepper
        self._arrived: asyncio.Queue[list[tuple[int, StepOutput]] | Exception | None]
        self._arrived = asyncio.Queue()
        self._num_open = sum(len(one.continuations) for one in self.requests)

    async def steps(self) -> AsyncIterator[list[tuple[int, StepOutput]]]:
        """Yield what each engine step added: pairs of the prompt's place and its output.

        Ends when all continuations have ended.

        Raises:
            ApiError: if the requests were given up.
        """
        while self._num_open:
            arrived = await self._arrived.get()
            if isinstance(arrived, Exception):
                raise arrived
            if arrived is None:
                return
            self._num_open -= sum(step.finished for _, step in arrived)
            yield arrived

    def drop(self) -> None:
        """Give the requests up; the reader's `steps` end."""
        self._stepper.drop(self)
        self._arrived.put_nowait(None)

    def fail(self, error: Exception) -> None:
        """End `steps` with an error; on the event loop."""
        self._arrived.put_nowait(error)

    def put(self, steps: list[tuple[int, StepOutput]]) -> None:
        self._arrived.put_nowait(steps)

    def collect(self) -> tuple[list[tuple[int, StepOutput]], Exception | None]:
        """Take what is new; in the thread that steps."""
        found: list[tuple[int, StepOutput]] = []
        failure: Exception | None = None
        for place, request in enumerate(self.requests):
            while request.outbox:
                found.append((place, request.outbox.popleft()))
            for one in request.continuations:
                if one.finish_reason == "abort":
                    failure = one.failure or RuntimeError("the request was dropped")
        return found, failure


_News = tuple[Stream, list[tuple[int, StepOutput]], Exception | None]


class Stepper:
    """Steps the engine in a thread of its own while there is work.

    Args:
        llm: the engine, which nothing else may use.
        loop: where outputs go.
        max_requests: most continuations that run or wait.
        on_steps: told in the thread what each engine step brought, for statistics.
    """

    def __init__(
        self,
        llm: LLM,
        loop: asyncio.AbstractEventLoop,
        *,
        max_requests: int,
        on_steps: Callable[[Stream, Sequence[tuple[int, StepOutput]]], None],
    ) -> None:
        self.llm = llm
        self._engine = llm._engine
        self._loop = loop
        self._max_requests = max_requests
        self._on_steps = on_steps
        self._streams: set[Stream] = set()  # changed on the event loop only
        self._num_submitted = 0
        self._entered: deque[Stream] = deque()
        self._has_news = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="hybridspec-steps", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread does its work."""
        return self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """Continuations that run or wait."""
        return self._num_submitted

    def submit(self, requests: Sequence[Request]) -> Stream:
        """Queue requests; on the event loop.

        Raises:
            ApiError: if too many are there already, or these are too many alone.
        """
        count = sum(len(one.continuations) for one in requests)
        if count > self._max_requests:  # to come again would not help
            message = f"n: expected at most {self._max_requests} continuations, got {count}"
            raise ApiError(400, message, param="n")
        if self._num_submitted + count > self._max_requests:
            raise ApiError(
                429,
                f"the queue is full ({self._num_submitted} of {self._max_requests} continuations "
                f"run or wait, this request has {count})",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._num_submitted += count
        stream = Stream(self, requests)
        self._streams.add(stream)
        self._entered.append(stream)
        for request in requests:
            self._engine.submit(request)
        self._has_news.set()
        return stream

    def drop(self, stream: Stream) -> None:
        """Forget a stream and give up what it has not finished; on the event loop."""
        if stream not in self._streams:
            return
        self._streams.remove(stream)
        every = [one for request in stream.requests for one in request.continuations]
        self._num_submitted -= len(every)
        stream.is_gone = True
        self._engine.drop(every)
        self._has_news.set()

    def end_all(self, error: Exception) -> None:
        """End every stream with an error; on the event loop."""
        for stream in list(self._streams):
            stream.fail(error)

    def stop(self) -> None:
        """End the thread when its step is done."""
        self._is_stopping = True
        self._has_news.set()
        self._thread.join()

    def _run(self) -> None:
        live: dict[Stream, None] = {}
        num_failed = 0  # steps, one after the other
        while not self._is_stopping:
            if not self._engine.has_work:
                self._has_news.wait()
                self._has_news.clear()
            failure: Exception | None = None
            try:
                with self._engine.lock:
                    self._engine.step()
                num_failed = 0
            except Exception as error:  # each request that it took along knows why
                _log.exception("a step failed")
                num_failed += 1
                failure = error if num_failed == _MOST_FAILED else None
            while self._entered:
                live[self._entered.popleft()] = None
            live = {stream: None for stream in live if not stream.is_gone}
            news = [found for stream in live if (found := self._collected(stream, failure))]
            if news:
                self._loop.call_soon_threadsafe(_hand_out, news)
        self._engine.drop(())  # takes in what was dropped during the last step

    def _collected(self, stream: Stream, failure: Exception | None) -> _News | None:
        try:
            steps, lost = stream.collect()
            if steps:
                self._on_steps(stream, steps)
        except Exception as error:  # a bug, which ends one stream and not the thread
            _log.exception("a stream failed")
            steps, lost = [], error
        lost = lost or failure
        return (stream, steps, lost) if steps or lost else None


def _hand_out(news: list[_News]) -> None:
    for stream, steps, failure in news:
        if steps:
            stream.put(steps)
        if failure is not None:
            never_fits = isinstance(failure, CapacityError)
            stream.fail(wrong_call(failure) if never_fits else ApiError(500, str(failure)))
