"""`hybridspec serve`: OpenAI's interface over one engine."""

from __future__ import annotations

import argparse
import errno
import functools
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hybridspec.cli.arguments import engine_options
from hybridspec.cli.loading import open_engine
from hybridspec.cli.usage import UsageError, usage_errors
from hybridspec.serve.app import Server, create_app
from hybridspec.serve.gateway import create_gateway
from hybridspec.serve.options import ServeOptions

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status."""
    engine_options(arguments)  # a wrong flag is told before anything is opened
    options = _options(arguments)
    app, on_hangup = _application(arguments, options)
    server = Server(
        app,
        host=arguments.host,
        port=arguments.port,
        drain_s=arguments.drain,
        on_hangup=on_hangup,
    )
    listening = _listen(arguments.host, arguments.port)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"listening on http://{shown}:{port}", file=sys.stderr, flush=True)
    # uvicorn raises the signal that ended it once more when all is done.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
    if server.failure is not None:
        raise server.failure
    return 0


def _application(
    arguments: argparse.Namespace, options: dict[str, Any]
) -> tuple[Any, Callable[[], Awaitable[None]] | None]:
    """Return what to serve, and what to do when the process is told to reload."""
    with usage_errors():
        behaviour = ServeOptions.of(options)
    load_model = functools.partial(open_engine, arguments)
    if arguments.replicas is None:
        return create_app(load_model, behaviour), None
    uses_gpus = _uses_gpus(arguments.device)
    from hybridspec.serve import ray

    def start() -> ray.RayReplicas:
        return ray.start_here(
            load_model, options, num_replicas=arguments.replicas, uses_gpus=uses_gpus
        )

    app = create_gateway(start, most_bytes=behaviour.limits.body_bytes)
    return app, app.state.served.restart


def _uses_gpus(device: str) -> bool:
    """Whether each replica takes a GPU."""
    if device.startswith("cuda:"):
        raise UsageError("--replicas: each takes a GPU of its own; give --device cuda")
    import torch

    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the application, as they can travel to a replica."""
    checked = [("port", 0, 65535), ("max_requests", 1, 10**6), ("drain", 0, 10**6)]
    if arguments.replicas is not None:
        checked.append(("replicas", 1, 1024))
    for name, least, most in checked:
        if not least <= (value := getattr(arguments, name)) <= most:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag}: expected {least} to {most}, got {value}")
    return {
        "model_name": arguments.served_model_name or arguments.model or "bundled",
        "api_key_file": arguments.api_key_file,
        "max_requests": arguments.max_requests,
        "drain_s": arguments.drain,
        "cors_origins": arguments.cors_origins,
        "chat_template": _template(arguments.chat_template),
        "trusts_templates": arguments.trust_request_chat_template,
    }


def _template(given: str | None) -> str | None:
    if given is None or not Path(given).is_file():
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"--chat-template: {given} is not UTF-8 text") from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=_family(host), backlog=2048)
    except OSError as error:
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise UsageError(f"--host, --port: cannot listen on {host}:{port}: {reason}") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
