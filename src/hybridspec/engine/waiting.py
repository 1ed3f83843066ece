"""Callers that wait for their requests, and step the engine while they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from hybridspec.engine.engine import Engine
from hybridspec.engine.outputs import StepOutput
from hybridspec.engine.request import Request

__all__ = ["in_threads", "run_requests"]


def run_requests(engine: Engine, requests: Sequence[Request]) -> Iterator[StepOutput]:
    """Run the engine until these requests are done; drop them if the caller stops early.

    Others may do the same, also in other threads: one at a time runs a step, for all requests.
    """
    outboxes = [request.outbox for request in requests]
    everyone = [one for request in requests for one in request.continuations]
    try:
        for request in requests:
            engine.submit(request)
        is_running = bool(requests)
        while is_running:
            engine.guard.check()  # a forked child would wait for the lock
            with engine.lock:
                if not any(outboxes):
                    engine.step()
                reasons = [one.finish_reason for one in everyone]
                steps: list[StepOutput] = []
                for outbox in outboxes:
                    steps += outbox
                    outbox.clear()
            yield from steps
            if "abort" in reasons:
                dropped = RuntimeError("the request was dropped")
                raise next((r.failure for r in everyone if r.failure is not None), dropped)
            is_running = None in reasons
    finally:
        engine.drop(everyone)


async def in_threads(steps: Iterator[StepOutput]) -> AsyncIterator[StepOutput]:
    """Yield steps that are waited for in threads, so that the event loop goes on."""
    # A cancelled task leaves its thread inside `next`; the steps end when nobody holds them. Its
    # error, which the task keeps, holds this frame, and with `to_thread` one that has them as well.
    loop = asyncio.get_running_loop()
    try:
        while (step := await loop.run_in_executor(None, next, steps, None)) is not None:
            yield step
    finally:
        del steps
