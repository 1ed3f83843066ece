"""A stand-in for the Hugging Face hub on 127.0.0.1 that serves folders as repositories."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["HubServer", "serve_hub"]

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """What a test sees of the server.

    Args:
        repositories: folders by id; None stands for a repository that is gated.

    Attributes:
        url: what HF_ENDPOINT is to be.
        fetched: names of the files that were downloaded, in order.
        revisions: what was asked for of a repository, in order.
    """

    def __init__(self, repositories: dict[str, Path | None]) -> None:
        self.repositories = repositories
        self.url = ""
        self.fetched: list[str] = []
        self.revisions: list[str] = []

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the answer to a request."""
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, verb, *rest = [*(parts[2:] if is_api else parts), "", "", ""]
        repository = f"{owner}/{name}"
        if repository not in self.repositories:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        folder = self.repositories[repository]
        if folder is None:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if is_api and verb in ("revision", "tree") and rest[0] not in ("main", "v2", _COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if is_api and verb == "revision":
            self.revisions.append(rest[0])
            return 200, {}, json.dumps({"id": repository, "sha": _COMMIT, "siblings": []}).encode()
        if is_api and verb == "tree":
            return 200, {}, json.dumps([_entry(folder, file) for file in _files(folder)]).encode()
        file = folder / "/".join(part for part in rest[1:] if part)
        if verb != "resolve" or not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        if method == "GET":
            self.fetched.append(file.name)
        headers = {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": _COMMIT}
        return 200, headers, file.read_bytes()


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _entry(folder: Path, file: Path) -> dict[str, object]:
    return {
        "type": "file",
        "path": str(file.relative_to(folder)),
        "size": file.stat().st_size,
        "oid": _digest(file),
    }


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serve_hub(repositories: dict[str, Path | None]) -> Iterator[HubServer]:
    """Serve repositories until the context ends."""
    hub = HubServer(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _respond(self) -> None:
            status, headers, body = hub.answer(self.command, self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD = _respond

        def log_message(self, format: str, *args: object) -> None:
            """Keep the output of the tests clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
