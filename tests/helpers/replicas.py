"""Replicas in this process, which end when a test says so; and a caller of ASGI applications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message

from hybridspec.serve.gateway import ReplicaLost
from hybridspec.serve.placement import Placement

__all__ = ["LocalReplicas", "ask", "scope_of"]


async def answers(
    app: ASGIApp, scope: dict[str, Any], body: bytes
) -> AsyncGenerator[Message, None]:
    """Yield the messages of an application's answer; closing it early ends its work."""
    arrived: asyncio.Queue[Message | None] = asyncio.Queue()
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return requests.pop() if requests else await asyncio.Future()

    async def send(message: Message) -> None:
        arrived.put_nowait(message)

    task = asyncio.ensure_future(app(dict(scope), receive, send))
    task.add_done_callback(lambda _: arrived.put_nowait(None))
    try:
        while (message := await arrived.get()) is not None:
            yield message
    finally:
        task.cancel()
        await asyncio.wait((task,))


def scope_of(path: str, method: str = "POST") -> dict[str, Any]:
    """The scope of a request in JSON."""
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip


async def ask(
    app: ASGIApp, path: str, body: bytes = b"", method: str = "POST"
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Return status, headers and body of an answer."""
    start, *rest = [message async for message in answers(app, scope_of(path, method), body)]
    assert start["type"] == "http.response.start"
    return start["status"], dict(start["headers"]), b"".join(one["body"] for one in rest)


class LocalReplicas:
    """Applications by name.

    Attributes:
        apps: those that there are.
        lost_after: messages after which an answer of one breaks off.
        went: names of those that were asked, in order.
        open: answers that run.
    """

    def __init__(self, apps: dict[str, ASGIApp]) -> None:
        self.apps = apps
        self.lost_after: dict[str, int] = {}
        self.went: list[str] = []
        self.open = 0
        self.is_closed = False
        self.num_restarts = 0
        self._placement = Placement()

    async def answer(
        self, key: str | None, scope: dict[str, Any], body: bytes
    ) -> AsyncGenerator[str | Message, None]:
        while not self.apps:
            await asyncio.sleep(0.01)
        name = self._placement.order(key, list(self.apps))[0]
        self.went.append(name)
        self._placement.begin(name)
        self.open += 1
        left = self.lost_after.get(name, 10**9)
        try:
            yield name
            async for message in answers(self.apps[name], scope, body):
                if (left := left - 1) < 0:
                    del self.apps[name]
                    raise ReplicaLost(name)
                yield message
        finally:
            self._placement.end(name)
            self.open -= 1

    async def metrics(self) -> list[list[Metric]]:
        found = []
        for name in self.apps:
            family = GaugeMetricFamily("hybridspec:slots", "Slots.", labels=["replica"])
            family.add_metric([name], 2)
            found.append([family])
        return found

    async def loads(self) -> list[int]:
        return [3 for _ in self.apps]

    def restart(self) -> None:
        self.num_restarts += 1

    async def close(self) -> None:
        self.is_closed = True
