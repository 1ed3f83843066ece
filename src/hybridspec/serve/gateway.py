"""The front of several replicas: hands each request to one, and again to another if that one ends.

It knows what a replica answers and not how it is reached (`Replicas`), nor does it look into
requests further than their prefix: whatever a replica serves comes through as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from hybridspec.serve.app import assemble
from hybridspec.serve.errors import ApiError, error_body, going_down, loading
from hybridspec.serve.metrics import render
from hybridspec.serve.placement import Affinity, prefix_key
from hybridspec.serve.wire import DONE, Json, event, read_bytes, until_gone

__all__ = ["Gateway", "ReplicaLost", "Replicas", "create_gateway"]

_MOST_TRIES = 3
_WAIT_S = 10.0  # for a replica that takes a request: longer than one is chosen, shorter than a load


class ReplicaLost(Exception):
    """A replica ended before its answer did."""


class Replicas(Protocol):
    """What answers requests."""

    def answer(
        self, key: str | None, scope: Scope, body: bytes
    ) -> AsyncGenerator[str | Message, None]:
        """Yield the name of the replica that took the request, then the messages of its answer.

        Closing it early ends the work on the request.

        Args:
            key: name of the prefix, for the choice of the replica.
            scope: of the request.
            body: all of it.

        Raises:
            ReplicaLost: if that replica ends.
        """

    async def metrics(self) -> Sequence[Sequence[Metric]]:
        """Return the metrics of each replica."""

    async def loads(self) -> Sequence[int]:
        """Return how many continuations run or wait in each replica."""

    def restart(self) -> None:
        """Put a new replica in the place of each, one after the other; waits until it is done."""

    async def close(self) -> None:
        """End them."""


class _Answer:
    """The answer as the client gets it; its head is held back until there is something to say."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None
        self.has_begun = False

    async def put(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if self._head is not None and not self.has_begun:
            self.has_begun = True
            await self._send(self._head)
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Tell the client what went wrong.

        Raises:
            ApiError: the same, if nothing was sent so far or it cannot be told.
        """
        headers = dict(self._head["headers"]) if self._head is not None else {}
        is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if not self.has_begun or not is_stream:
            raise error
        last = event(error_body(error)) + DONE
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


class Gateway:
    """The state behind the paths.

    Args:
        most_bytes: longest body that is taken.
    """

    def __init__(self, most_bytes: int) -> None:
        self.is_draining = False
        self.affinity = Affinity()
        self._most_bytes = most_bytes
        self._replicas: Replicas | None = None
        self._ended: set[asyncio.Event] = set()  # one for each request that runs

    # Life

    async def load(self, start: Callable[[], Replicas]) -> None:
        self._replicas = await run_in_threadpool(start)

    async def restart(self) -> None:
        """Restart the replicas one after the other; requests go to the others meanwhile."""
        await run_in_threadpool(self.replicas.restart)

    def end_requests(self) -> None:
        """End what still runs, telling each client why."""
        for ended in self._ended:
            ended.set()

    async def close(self) -> None:
        if self._replicas is not None:
            await self._replicas.close()

    @property
    def replicas(self) -> Replicas:
        if self.is_draining:
            raise going_down()
        if self._replicas is None:
            raise loading()
        return self._replicas

    # What is told about all replicas

    async def health(self, http: HttpRequest) -> Response:
        return Response()

    async def load_now(self, http: HttpRequest) -> Response:
        loads = [] if self._replicas is None else await self._replicas.loads()
        return Json({"server_load": sum(loads)})

    async def show_metrics(self, http: HttpRequest) -> Response:
        every = [] if self._replicas is None else await self._replicas.metrics()
        found = [*self._own_metrics(len(every)), *(metric for one in every for metric in one)]
        text = await run_in_threadpool(render, found)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _own_metrics(self, num_replicas: int) -> list[Metric]:
        placed = CounterMetricFamily(
            "hybridspec:routed_requests",
            "Requests by whether they found the replica that had their prefix last.",
            labels=["prefix"],
        )
        for outcome, count in self.affinity.counts.items():
            placed.add_metric([outcome], count)
        there = GaugeMetricFamily("hybridspec:replicas", "Replicas that answer.", num_replicas)
        return [placed, there]

    # Answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a replica answer a request; an ASGI application."""
        replicas = self.replicas
        body = await read_bytes(HttpRequest(scope, receive), self._most_bytes)
        key = prefix_key(scope["path"], body) if scope["method"] == "POST" else None
        answer, ended = _Answer(send), asyncio.Event()
        self._ended.add(ended)
        work = asyncio.ensure_future(self._answered(replicas, key, scope, body, answer))
        others = [asyncio.ensure_future(until_gone(receive)), asyncio.ensure_future(ended.wait())]
        try:
            await asyncio.wait((work, *others), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ended.remove(ended)
            is_cut = not work.done()
            for task in (work, *others):
                task.cancel()
            await asyncio.wait((work, *others))
        if is_cut and not ended.is_set():
            return  # nobody reads it
        try:
            if is_cut:
                raise going_down()
            work.result()
        except ApiError as error:
            await answer.fail(error)

    async def _answered(
        self,
        replicas: Replicas,
        key: str | None,
        scope: Scope,
        body: bytes,
        answer: _Answer,
    ) -> None:
        for _ in range(_MOST_TRIES):
            try:
                async with contextlib.aclosing(replicas.answer(key, scope, body)) as messages:
                    await self._taken(key, messages)
                    async for message in messages:
                        assert not isinstance(message, str)
                        await answer.put(message)
                return
            except ReplicaLost:
                if answer.has_begun:
                    break
        raise ApiError(
            503,
            "the replica that answered has ended; ask again",
            code="replica_lost",
            headers={"Retry-After": "1"},
        )

    async def _taken(self, key: str | None, messages: AsyncIterator[str | Message]) -> None:
        """Wait until a replica takes the request."""
        try:
            async with asyncio.timeout(_WAIT_S):
                name = await anext(messages)
        except TimeoutError:
            raise ApiError(
                503, "no replica is free", code="no_replica", headers={"Retry-After": "5"}
            ) from None
        if key is not None:
            assert isinstance(name, str)
            self.affinity.note(key, name)


def create_gateway(start: Callable[[], Replicas], *, most_bytes: int) -> Starlette:
    """Return the application; it starts the replicas when it starts.

    Args:
        start: returns them, which then belong to the application.
        most_bytes: longest body that is taken.
    """
    gateway = Gateway(most_bytes)
    routes = [
        Route("/health", gateway.health),
        Route("/load", gateway.load_now),
        Route("/metrics", gateway.show_metrics),
        Route("/{path:path}", gateway),
    ]
    return assemble(gateway, lambda: gateway.load(start), routes)
