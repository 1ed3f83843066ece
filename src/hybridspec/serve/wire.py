"""Request bodies, answers and event streams on the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridspec.serve.errors import ApiError, from_validation

__all__ = [
    "DONE",
    "EventStream",
    "Json",
    "event",
    "or_disconnect",
    "read_body",
    "read_bytes",
    "to_json",
    "until_gone",
]

DONE = b"data: [DONE]\n\n"  # the last event of a stream
_MOST_BRACKETS = 131_072  # of a body; to read as many lists takes a quarter of a second

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")


def to_json(content: Any) -> bytes:
    """Return JSON in UTF-8; half a surrogate pair, which UTF-8 lacks, stays an escape."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", errors="backslashreplace")


def event(content: Any) -> bytes:
    """Return one event of a stream."""
    return b"data: " + to_json(content) + b"\n\n"


class Json(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """Read a request's body.

    Raises:
        ApiError: if it is too long, or ends early.
    """
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise ApiError(413, f"body: expected at most {max_bytes} bytes")
            chunks.append(chunk)
    except ClientDisconnect:
        raise ApiError(400, "body: it ended early") from None
    return b"".join(chunks)


async def read_body(request: Request, kind: type[Body], max_bytes: int) -> Body:
    """Read and check a request's body.

    Raises:
        ApiError: if it is too long, no JSON object, or a field is wrong. Millions of lists are
            refused before they are made, since nobody else is served meanwhile.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(
            415,
            f"content-type: expected application/json, got {media[:80]!r}; with curl: "
            f"-H 'Content-Type: application/json'",
        )
    raw = await read_bytes(request, max_bytes)
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > _MOST_BRACKETS:
        raise ApiError(
            400, f"body: holds {brackets} of [ and {{, expected at most {_MOST_BRACKETS}"
        )
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"body: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise ApiError(400, f"body: expected a JSON object, got {type(content).__name__}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise from_validation(error) from None


async def or_disconnect(request: Request, work: Awaitable[Result]) -> Result | None:
    """Wait for work, which is cancelled if the client goes away.

    Returns:
        Its result, or None where no caller waits for it any more.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()


async def until_gone(receive: Receive) -> None:
    """Wait until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events.

    Args:
        pieces: makes the events; closed when the client goes away.
        on_end: called once at the end, whatever ended it.
    """

    def __init__(self, pieces: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._pieces = pieces
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(until_gone(receive))
        gone.add_done_callback(lambda _: self._on_end())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # the client went away in the middle of a piece
            pass
        finally:
            gone.cancel()
            self._on_end()
