"""`hybridspec serve`: OpenAI's interface over one engine."""

from __future__ import annotations

import argparse
import errno
import signal
import socket
import sys
from pathlib import Path

from hybridspec.cli.arguments import engine_options
from hybridspec.cli.loading import open_engine
from hybridspec.cli.usage import UsageError
from hybridspec.serve.api import ServeOptions
from hybridspec.serve.app import Server, create_app

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status."""
    engine_options(arguments)  # a wrong flag is told before anything is opened
    options = _options(arguments)
    app = create_app(lambda: open_engine(arguments), options)
    server = Server(app, host=arguments.host, port=arguments.port, drain_s=options.drain_s)
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


def _options(arguments: argparse.Namespace) -> ServeOptions:
    for name, least, most in (("port", 0, 65535), ("max_requests", 1, 10**6), ("drain", 0, 10**6)):
        if not least <= (value := getattr(arguments, name)) <= most:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag}: expected {least} to {most}, got {value}")
    return ServeOptions(
        model_name=arguments.served_model_name or arguments.model or "bundled",
        api_keys=_keys(arguments.api_key_file),
        max_requests=arguments.max_requests,
        drain_s=arguments.drain,
        cors_origins=arguments.cors_origins,
        chat_template=_template(arguments.chat_template),
        trusts_templates=arguments.trust_request_chat_template,
    )


def _keys(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"--api-key-file: {file} is not UTF-8 text") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:  # an empty file must not open the door
        raise UsageError(f"--api-key-file: {file} holds no key")
    return keys


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
