"""The ASGI application, and what runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from hybridspec.engine import LLM
from hybridspec.serve.api import Api
from hybridspec.serve.errors import ApiError, error_response
from hybridspec.serve.options import ServeOptions
from hybridspec.serve.stalled import Stalled

__all__ = ["Served", "Server", "assemble", "create_app"]

_log = logging.getLogger("hybridspec.serve")
_PAGE = Path(__file__).with_name("page.html")
_STALLED_S = 60  # between two looks for clients that do nothing
_CLOSING_S = 5.0  # for answers to reach their clients once their requests have ended
_AT_ONCE_S = 2.0  # the same after a second signal
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


class Served(Protocol):
    """What an application is made of.

    Attributes:
        is_draining: set once the server takes no new requests.
    """

    is_draining: bool

    def end_requests(self) -> None:
        """End what still runs, telling each client why."""

    async def close(self) -> None:
        """Let go of everything; nothing runs any more."""


def assemble(
    served: Served,
    load: Callable[[], Awaitable[None]],
    routes: Sequence[BaseRoute],
    *,
    cors_origins: Sequence[str] = (),
) -> Starlette:
    """Return an application that answers errors in the interface's shape.

    Args:
        served: what its routes belong to; `app.state.served`.
        load: run when the application starts, while it answers already. What comes of it is told to
            `app.state.on_loaded`.
        routes: the paths.
        cors_origins: web pages of other origins that browsers let in.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loading = asyncio.ensure_future(load())
        loading.add_done_callback(lambda task: app.state.on_loaded(task))
        try:
            yield
        finally:
            await asyncio.wait([loading])
            await served.close()

    middleware = []
    if cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
            )
        )
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
        lifespan=lifespan,
    )
    app.state.served = served
    app.state.on_loaded = _report_loading
    return app


def create_app(load_model: Callable[[], LLM], options: ServeOptions) -> Starlette:
    """Return the application; it loads the model when it starts.

    Args:
        load_model: returns the engine, which then belongs to the application.
        options: how it behaves.
    """
    api = Api(options)

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, handler, methods=[method])

    routes = [
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
    ]
    return assemble(api, lambda: api.load(load_model), routes, cors_origins=options.cors_origins)


def _is_news(record: logging.LogRecord) -> bool:
    """Tell whether a record of uvicorn's is about more than a client that went away.

    uvicorn does not see the end of a connection while a second request of it waits, and uvloop
    raises for what is written to it then.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, RuntimeError) and "the handler is closed" in str(error))


def _report_loading(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the model cannot be loaded: %s", error)


class Server(uvicorn.Server):
    """Serves an application until SIGTERM or Ctrl-C, then lets what runs finish.

    Running requests have `drain_s` seconds; then they are ended with an error that their clients
    see. A second signal ends them so at once, and a third one, or two seconds, whatever is left.

    Args:
        app: what `assemble` made.
        host: address to listen on.
        port: 0 takes a free one.
        drain_s: see above.
        on_hangup: what SIGHUP asks for; None leaves that signal alone.
    """

    def __init__(
        self,
        app: Starlette,
        *,
        host: str,
        port: int,
        drain_s: float,
        on_hangup: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
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
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        super().__init__(config)
        self.failure: BaseException | None = None
        self.stalled = Stalled()
        self._is_loaded = asyncio.Event()
        self._app = app
        self._drain_s = drain_s
        self._on_hangup = on_hangup
        self._hangups: set[asyncio.Future[None]] = set()
        self._num_signals = 0
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
        if self._on_hangup is not None:
            self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        try:
            await super().serve(sockets)
        finally:
            self._loop = None

    async def on_tick(self, counter: int) -> bool:
        """Do what is due; uvicorn calls it ten times a second."""
        if counter % (10 * _STALLED_S) == 0:
            self._look()
        return await super().on_tick(counter)

    def _hang_up(self) -> None:
        """Begin what SIGHUP asks for; one that comes meanwhile is dropped."""
        if self._on_hangup is None or self._hangups:
            return
        work = asyncio.ensure_future(self._on_hangup())
        self._hangups.add(work)
        work.add_done_callback(self._hung_up)

    def _hung_up(self, work: asyncio.Future[None]) -> None:
        self._hangups.clear()
        if not work.cancelled() and (error := work.exception()) is not None:
            _log.error("the restart failed: %s", error)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; called by signals."""
        self._num_signals += 1
        if self._num_signals > 1:  # uvicorn takes a second SIGINT as: without looking back
            sig = signal.SIGTERM if self._num_signals == 2 else signal.SIGINT
        super().handle_exit(sig, frame)
        if self._loop is not None:
            drain_s = self._drain_s if self._num_signals == 1 else 0.0
            self._loop.call_soon_threadsafe(self._drain, drain_s)

    async def loaded(self) -> None:
        """Wait until the application has loaded and is listened for.

        Raises:
            What loading raised.
        """
        await self._is_loaded.wait()
        if self.failure is not None:
            raise self.failure
        while self.address is None:
            await asyncio.sleep(0.01)

    def end(self) -> None:
        """Begin to end, from any thread."""
        self.handle_exit(signal.SIGTERM, None)

    def _drain(self, drain_s: float) -> None:
        if self._loop is None:
            return
        served: Served = self._app.state.served
        served.is_draining = True
        self._look()
        self._loop.call_later(drain_s, self._look)  # half a request would never end
        self._loop.call_later(drain_s, served.end_requests)
        if self._num_signals > 1:
            self._loop.call_later(_AT_ONCE_S, self._leave)

    def _leave(self) -> None:
        self.force_exit = True

    def _look(self) -> None:
        self.stalled.look(self.server_state.connections)

    def _on_loaded(self, task: asyncio.Future[Any]) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):  # Ray puts its own over uvicorn's
                signal.signal(number, self.handle_exit)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = error
            self.should_exit = True
        self._is_loaded.set()
