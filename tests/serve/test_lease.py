"""How a front sends a request to a replica; needs aiohttp, which Ray brings (make test-cluster)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from helpers.replicas import scope_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


async def echo(http: Request) -> Response:
    names = sorted({name for name, _ in http.headers.items()})
    asked = [http.method, http.url.path, http.url.query, (await http.body()).decode(), names]
    return JSONResponse(asked, 201, headers={"X-Own": "value"})


async def stream(http: Request) -> Response:
    async def pieces() -> AsyncIterator[str]:
        for i in range(1000):
            yield f"data: {i}\n\n"
            await asyncio.sleep(0.01)

    return StreamingResponse(pieces(), media_type="text/event-stream")


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, Any]]:
    """An application with leases on a port; where, and its leases."""
    from hybridspec.serve.lease import Leased, Leases

    leases = Leases()
    app = Starlette(
        routes=[Route("/stream", stream, methods=["POST"]),
                Route("/{rest:path}", echo, methods=["GET", "POST"])]
    )  # fmt: skip
    app.add_middleware(Leased, leases=leases)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as port:
        serving = asyncio.ensure_future(server.serve(sockets=[port]))
        yield f"http://127.0.0.1:{port.getsockname()[1]}", leases
        server.should_exit = server.force_exit = True
        await serving


def run(work: Any) -> None:
    async def whole() -> None:
        from hybridspec.serve.lease import ReplicaClient

        async with listening() as (url, leases):
            client = ReplicaClient()
            try:
                await asyncio.wait_for(work(url, leases, client), 60)
            finally:
                await client.close()

    asyncio.run(whole())


def test_requests_and_answers_come_through_as_they_are() -> None:
    async def work(url: str, leases: Any, client: Any) -> None:
        password, is_over = leases.make()
        scope = scope_of("/some%20path") | {"path": "/some path", "query_string": b"a=%2F&b"}
        scope["headers"] += [(b"authorization", b"Bearer x"), (b"x-hybridspec-lease", b"forged"),
                             (b"host", b"elsewhere")]  # fmt: skip
        start, *rest = [one async for one in client.answer(url, password, scope, b'{"a": 1}')]
        assert start["status"] == 201 and (b"x-own", b"value") in start["headers"]
        names = {name for name, _ in start["headers"]}
        assert not names & {b"date", b"transfer-encoding", b"connection"}
        assert json.loads(b"".join(one["body"] for one in rest)) == [
            "POST", "/some path", "a=%2F&b", '{"a": 1}',
            ["authorization", "content-length", "content-type", "host", "x-hybridspec-lease"],
        ]  # fmt: skip
        assert rest[-1]["more_body"] is False
        await asyncio.wait_for(is_over.wait(), 10)

    run(work)


def test_a_lease_is_good_for_one_request() -> None:
    async def work(url: str, leases: Any, client: Any) -> None:
        password, _ = leases.make()
        scope = scope_of("/", "GET")
        for given, status in (("wrong", 403), (password, 201), (password, 403), ("", 403)):
            messages = [one async for one in client.answer(url, given, scope, b"")]
            assert messages[0]["status"] == status

    run(work)


def test_a_lease_that_nobody_uses_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(url: str, leases: Any, client: Any) -> None:
        from hybridspec.serve import lease

        monkeypatch.setattr(lease, "_UNUSED_S", 0.05)
        await leases.wait(*leases.make())
        password, is_over = leases.make()
        waiting = asyncio.ensure_future(leases.wait(password, is_over))
        assert leases.use(password) is is_over
        await asyncio.sleep(0.2)
        assert not waiting.done()  # it is used, and as long as it is
        is_over.set()
        await waiting
        assert not leases._open

    run(work)


def test_an_answer_that_is_left_ends_its_request() -> None:
    async def work(url: str, leases: Any, client: Any) -> None:
        password, is_over = leases.make()
        messages = client.answer(url, password, scope_of("/stream"), b"{}")
        async for message in messages:
            if message.get("body"):
                break
        assert not is_over.is_set()
        await messages.aclose()
        await asyncio.wait_for(is_over.wait(), 10)

    run(work)


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", b""])
def test_a_connection_that_breaks_is_a_lost_replica(answer: bytes | None) -> None:
    """Refused, in the middle of an answer, and before one."""

    async def whole() -> None:
        from hybridspec.serve.gateway import ReplicaLost
        from hybridspec.serve.lease import ReplicaClient

        async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer or b"")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(broken, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if answer is None:
            server.close()
        client = ReplicaClient()
        with pytest.raises(ReplicaLost):
            async for _ in client.answer(f"http://127.0.0.1:{port}", "x", scope_of("/"), b"{}"):
                pass
        await client.close()
        server.close()

    asyncio.run(whole())
