"""The front of several replicas, with replicas in this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from helpers.replicas import LocalReplicas, ask, scope_of
from hybridspec.serve import gateway as gateway_module
from hybridspec.serve.gateway import Gateway, create_gateway

BODY = b'{"prompt": "import os"}'
LIMIT = 1000


def replica(name: str, *, pause_s: float = 0.0) -> Starlette:
    """Streams its name five times, or says it once."""

    async def stream(http: Request) -> Response:
        await http.body()

        async def pieces() -> Any:
            for i in range(5):
                yield f"data: {name}{i}\n\n"
                await asyncio.sleep(pause_s)

        return StreamingResponse(pieces(), media_type="text/event-stream")

    async def whole(http: Request) -> Response:
        return JSONResponse({"name": name, "asked": json.loads(await http.body())})

    async def other(http: Request) -> Response:
        return PlainTextResponse(f"{name} {http.method} {http.url.path}?{http.url.query}", 418)

    async def broken(http: Request) -> Response:
        raise ZeroDivisionError("a bug")

    return Starlette(
        routes=[
            Route("/v1/completions", stream, methods=["POST"]),
            Route("/v1/chat/completions", whole, methods=["POST"]),
            Route("/broken", broken, methods=["POST"]),
            Route("/{rest:path}", other),
        ]
    )


@pytest.fixture
def replicas() -> LocalReplicas:
    return LocalReplicas({name: replica(name) for name in "ab"})


def with_gateway(
    replicas: LocalReplicas, work: Callable[[Starlette, Gateway], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        app = create_gateway(lambda: replicas, most_bytes=LIMIT)
        async with app.router.lifespan_context(app):
            while app.state.served._replicas is None:
                await asyncio.sleep(0.001)
            await asyncio.wait_for(work(app, app.state.served), 60)
        assert replicas.is_closed and replicas.open == 0

    asyncio.run(run())


def test_answers_come_through_as_they_are(replicas: LocalReplicas) -> None:
    async def work(app: Starlette, _: Gateway) -> None:
        status, headers, body = await ask(app, "/v1/completions", BODY)
        [name] = replicas.went
        assert (status, headers[b"content-type"][:17]) == (200, b"text/event-stream")
        assert body.decode() == "".join(f"data: {name}{i}\n\n" for i in range(5))
        status, _, body = await ask(app, "/v1/chat/completions", b'{"messages": []}')
        assert (status, json.loads(body)["asked"]) == (200, {"messages": []})
        status, _, body = await ask(app, "/some/path", method="GET")
        assert status == 418 and body[1:] == b" GET /some/path?"
        assert (await ask(app, "/health", method="GET"))[0] == 200
        assert (await ask(app, "/broken"))[0] == 500

    with_gateway(replicas, work)


def test_a_prefix_stays_with_its_replica(replicas: LocalReplicas) -> None:
    async def work(app: Starlette, gateway: Gateway) -> None:
        prompts = [f'{{"prompt": "prefix {i}"}}'.encode() for i in range(8)]
        for _ in range(5):
            for prompt in prompts:
                await ask(app, "/v1/completions", prompt)
        assert replicas.went == replicas.went[:8] * 5 and set(replicas.went) == {"a", "b"}
        assert gateway.affinity.counts == {"first": 8, "kept": 32, "moved": 0}
        status, _, text = await ask(app, "/metrics", method="GET")
        lines = text.decode().splitlines()
        assert status == 200 and lines.count("# TYPE hybridspec:slots gauge") == 1
        for line in ('hybridspec:routed_requests_total{prefix="kept"} 32.0',
                     "hybridspec:replicas 2.0", 'hybridspec:slots{replica="a"} 2.0',
                     'hybridspec:slots{replica="b"} 2.0'):  # fmt: skip
            assert line in lines
        assert json.loads((await ask(app, "/load", method="GET"))[2]) == {"server_load": 6}

    with_gateway(replicas, work)


def test_one_that_ends_before_it_said_anything_is_replaced(replicas: LocalReplicas) -> None:
    """Its head was there already, its first token was not."""

    async def work(app: Starlette, _: Gateway) -> None:
        first = (await ask(app, "/v1/completions", BODY))[2][6:7].decode()
        other = "ab".replace(first, "")
        replicas.lost_after[first] = 1
        status, _, body = await ask(app, "/v1/completions", BODY)
        assert status == 200 and body.startswith(f"data: {other}0".encode())
        assert replicas.went == [first, first, other]

    with_gateway(replicas, work)


def test_one_that_ends_in_the_middle_says_so(replicas: LocalReplicas) -> None:
    async def work(app: Starlette, _: Gateway) -> None:
        replicas.apps = {name: replica(name, pause_s=0.01) for name in "ab"}
        replicas.lost_after = {"a": 3, "b": 3}
        status, _, body = await ask(app, "/v1/completions", BODY)
        events = body.decode().split("\n\n")
        assert status == 200 and events[-2:] == ["data: [DONE]", ""]
        error = json.loads(events[-3].removeprefix("data: "))["error"]
        assert error["code"] == "replica_lost" and len(events) == 5
        assert len(replicas.went) == 1

    with_gateway(replicas, work)


def test_all_that_end_give_up(replicas: LocalReplicas, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(app: Starlette, _: Gateway) -> None:
        replicas.apps = {name: replica(name) for name in "abcd"}
        replicas.lost_after = dict.fromkeys("abcd", 0)
        status, headers, body = await ask(app, "/v1/chat/completions", b'{"messages": []}')
        assert (status, json.loads(body)["error"]["code"]) == (503, "replica_lost")
        assert headers[b"retry-after"] == b"1" and len(replicas.went) == 3
        replicas.apps.clear()
        monkeypatch.setattr(gateway_module, "_WAIT_S", 0.05)
        status, _, body = await ask(app, "/v1/completions", BODY)
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_replica")

    with_gateway(replicas, work)


def test_a_client_that_leaves_ends_its_request(replicas: LocalReplicas) -> None:
    async def work(app: Starlette, gateway: Gateway) -> None:
        replicas.apps = {"a": replica("a", pause_s=30)}
        left = asyncio.Event()
        incoming = [{"type": "http.request", "body": BODY, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if incoming:
                return incoming.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        task = asyncio.create_task(app(scope_of("/v1/completions"), receive, send))
        while len(sent) < 2:
            await asyncio.sleep(0.001)
        assert replicas.open == 1
        left.set()
        await task
        assert replicas.open == 0 and len(sent) == 2 and not gateway._ended

    with_gateway(replicas, work)


def test_the_end_tells_those_who_are_not_done(replicas: LocalReplicas) -> None:
    async def work(app: Starlette, gateway: Gateway) -> None:
        replicas.apps = {"a": replica("a", pause_s=30)}
        running = asyncio.create_task(ask(app, "/v1/completions", BODY))
        while not replicas.open:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        gateway.is_draining = True
        assert (await ask(app, "/v1/completions", BODY))[0] == 503
        gateway.end_requests()
        status, _, body = await running
        assert status == 200 and b"the server is going down" in body and b"a0" in body
        assert body.endswith(b"data: [DONE]\n\n")

    with_gateway(replicas, work)


def test_bodies_are_bounded(replicas: LocalReplicas) -> None:
    async def work(app: Starlette, _: Gateway) -> None:
        status, _, body = await ask(app, "/v1/completions", b" " * (LIMIT + 1))
        assert status == 413 and json.loads(body)["error"]["message"].startswith("body: ")
        assert not replicas.went

    with_gateway(replicas, work)


def test_until_they_are_there(replicas: LocalReplicas) -> None:
    may_start = threading.Event()

    def start() -> LocalReplicas:
        may_start.wait()
        return replicas

    async def run() -> None:
        app = create_gateway(start, most_bytes=LIMIT)
        async with app.router.lifespan_context(app):
            status, _, body = await ask(app, "/ready", method="GET")
            assert (status, json.loads(body)["error"]["code"]) == (503, "loading")
            assert (await ask(app, "/health", method="GET"))[0] == 200
            assert json.loads((await ask(app, "/load", method="GET"))[2]) == {"server_load": 0}
            may_start.set()
            while app.state.served._replicas is None:
                await asyncio.sleep(0.001)
            await app.state.served.restart()
        assert replicas.num_restarts == 1

    asyncio.run(run())
