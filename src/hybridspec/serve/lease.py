"""How a front sends a request to a replica: over HTTP, with a password that is good for one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator

import aiohttp
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from hybridspec.serve.errors import ApiError, error_response
from hybridspec.serve.gateway import ReplicaLost

__all__ = ["Leased", "Leases", "ReplicaClient"]

_HEADER = b"x-hybridspec-lease"
_UNUSED_S = 30.0  # after which an unused lease ends
# Of one connection only; uvicorn writes `date` itself.
_OWN_HEADERS = {
    b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"te", b"trailer",
    b"upgrade", b"expect", b"host", b"date", _HEADER,
}  # fmt: skip


class Leases:
    """Those of one replica that were not used yet."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Event] = {}

    def make(self) -> tuple[str, asyncio.Event]:
        """Return a password, and an event that is set once the request with it is over."""
        password, is_over = secrets.token_urlsafe(24), asyncio.Event()
        self._open[password] = is_over
        return password, is_over

    def use(self, password: str) -> asyncio.Event | None:
        """Take a lease; None if there is none with this password."""
        return self._open.pop(password, None)

    async def wait(self, password: str, is_over: asyncio.Event) -> None:
        """Wait for the end of a request, or until it is plain that none comes."""
        try:
            await asyncio.wait_for(is_over.wait(), _UNUSED_S)
        except TimeoutError:
            if self.use(password) is None:  # it is used
                await is_over.wait()
        finally:
            self._open.pop(password, None)


class Leased:
    """Lets only requests with a lease into an application, and ends the lease with the request.

    Args:
        app: the application.
        leases: which there are.
    """

    def __init__(self, app: ASGIApp, leases: Leases) -> None:
        self._app = app
        self._leases = leases

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        is_over = self._leases.use(headers.get(_HEADER, b"").decode("latin-1"))
        if is_over is None:
            refusal = error_response(ApiError(403, "this port is for the server's front alone"))
            await refusal(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            is_over.set()


class ReplicaClient:
    """Sends requests to replicas as they came; made on the event loop that uses it."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def answer(
        self, url: str, password: str, scope: Scope, body: bytes
    ) -> AsyncGenerator[Message, None]:
        """Yield the messages of a replica's answer.

        Args:
            url, password: of the lease.
            scope, body: of the request.

        Raises:
            ReplicaLost: if the connection ends early, or there is none.
        """
        path = scope.get("raw_path") or scope["path"].encode()
        query = scope.get("query_string") or b""
        target = url + path.partition(b"?")[0].decode("latin-1")
        target += f"?{query.decode('latin-1')}" if query else ""
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name.lower() not in _OWN_HEADERS and name.lower() != b"content-length"
        ]
        headers.append((_HEADER.decode(), password))
        try:
            async with self._session.request(
                scope["method"],
                URL(target, encoded=True),
                headers=headers,
                data=body or None,
                allow_redirects=False,
            ) as answer:
                kept = [(n, v) for n, v in answer.raw_headers if n.lower() not in _OWN_HEADERS]
                yield {
                    "type": "http.response.start",
                    "status": answer.status,
                    "headers": [(name.lower(), value) for name, value in kept],
                }
                async for piece in answer.content.iter_any():
                    yield {"type": "http.response.body", "body": piece, "more_body": True}
                yield {"type": "http.response.body", "body": b"", "more_body": False}
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise ReplicaLost(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        await self._session.close()
