"""The ASGI application, and what runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from hybridspec.engine import LLM
from hybridspec.serve.api import Api, ServeOptions
from hybridspec.serve.errors import ApiError, error_response

__all__ = ["Server", "create_app"]

_log = logging.getLogger("hybridspec.serve")
_PAGE = Path(__file__).with_name("page.html")
_CLOSING_S = 5.0  # for answers to reach their clients once their requests have ended
Handler = Callable[[HttpRequest], Awaitable[Response]]


async def _page(http: HttpRequest) -> Response:
    policy = "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return HTMLResponse(
        _PAGE.read_text(encoding="utf-8"),
        headers={
            "Content-Security-Policy": f"{policy}; img-src data:; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        },
    )


async def _on_api_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path[:200]}: {error.detail}"
    return error_response(ApiError(error.status_code, message, headers=error.headers))


async def _on_bug(http: HttpRequest, error: Exception) -> Response:
    return error_response(ApiError(500, "internal error; the server's log says more"))


def create_app(load_model: Callable[[], LLM], options: ServeOptions) -> Starlette:
    """Return the application; it loads the model when it starts.

    Args:
        load_model: returns the engine, which then belongs to the application.
        options: how it behaves.
    """
    api = Api(options)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(api.load(load_model))
        loading.add_done_callback(lambda task: app.state.on_loaded(task))
        try:
            yield
        finally:
            await asyncio.wait([loading])
            await api.close()

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, handler, methods=[method])

    middleware = []
    if options.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(options.cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
            )
        )
    app = Starlette(
        routes=[
            route("/", _page),
            route("/health", api.health),
            route("/ready", api.ready),
            route("/version", api.version),
            route("/load", api.load_now),
            route("/metrics", api.show_metrics),
            route("/v1/models", api.models),
            route("/v1/models/{name:path}", api.model),
            route("/v1/completions", api.completions, "POST"),
            route("/v1/chat/completions", api.chat, "POST"),
            route("/tokenize", api.tokenize, "POST"),
            route("/detokenize", api.detokenize, "POST"),
        ],
        middleware=middleware,
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
        lifespan=lifespan,
    )
    app.state.api = api
    app.state.on_loaded = _report_loading
    return app


def _report_loading(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the model cannot be loaded: %s", error)


class Server(uvicorn.Server):
    """Serves an application until SIGTERM or Ctrl-C, then lets what runs finish.

    Running requests have `drain_s` seconds; then they are ended with an error that their clients
    see. A second signal ends everything at once.

    Args:
        app: what `create_app` made.
        host: address to listen on.
        port: 0 takes a free one.
        drain_s: see above.
    """

    def __init__(self, app: Starlette, *, host: str, port: int, drain_s: float) -> None:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=int(drain_s + _CLOSING_S) + 1,
        )
        super().__init__(config)
        self.failure: BaseException | None = None
        self._app = app
        self._drain_s = drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        app.state.on_loaded = self._on_loaded

    @property
    def address(self) -> tuple[str, int] | None:
        """Where it listens; None before it does."""
        for server in getattr(self, "servers", []):
            for listening in server.sockets:
                host, port = listening.getsockname()[:2]
                return host, port
        return None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().serve(sockets)
        finally:
            self._loop = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; called by signals."""
        if self.should_exit:
            sig = signal.SIGINT  # which uvicorn takes as: at once
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)

    def end(self) -> None:
        """Begin to end, from any thread."""
        self.handle_exit(signal.SIGTERM, None)

    def _drain(self) -> None:
        if self._loop is None:
            return
        api: Api = self._app.state.api
        api.is_draining = True
        self._loop.call_later(self._drain_s, api.end_requests)

    def _on_loaded(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = error
            self.should_exit = True
