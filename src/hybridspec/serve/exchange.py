"""One request through an ASGI application without a socket: what a replica does with each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import ASGIApp, Message

__all__ = ["answers", "plain_scope"]

_log = logging.getLogger("hybridspec.serve")
_PLAIN = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
          "root_path", "headers", "client", "server")  # fmt: skip


def plain_scope(scope: Any) -> dict[str, Any]:
    """Return what of a request's scope can travel to another process."""
    return {name: scope[name] for name in _PLAIN if name in scope}


async def answers(app: ASGIApp, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
    """Yield the messages of an application's answer; closing it early ends the application's work.

    Pieces of the body that are ready together come as one.

    Args:
        app: the application.
        scope: of the request; see `plain_scope`.
        body: all of it.
    """
    arrived: asyncio.Queue[Message | None] = asyncio.Queue()
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if requests:
            return requests.pop()
        return await asyncio.Future()  # no more comes; the client's leaving cancels the task

    async def send(message: Message) -> None:
        arrived.put_nowait(message)

    task = asyncio.ensure_future(app(dict(scope), receive, send))
    task.add_done_callback(lambda _: arrived.put_nowait(None))
    try:
        while (message := await arrived.get()) is not None:
            while message["type"] == "http.response.body" and not arrived.empty():
                more = arrived.get_nowait()
                if more is None:
                    arrived.put_nowait(None)
                    break
                message = {**more, "body": message.get("body", b"") + more.get("body", b"")}
            yield message
        if (error := task.exception()) is not None:  # the answer has said so already
            _log.error("a request failed", exc_info=error)
    finally:
        task.cancel()
        await asyncio.wait((task,))
