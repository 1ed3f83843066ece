"""Clients that do nothing where it is their turn, and others that are left alone."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from helpers.serving import Running
from hybridspec import LLM
from hybridspec.serve.options import ServeOptions

HEAD = (
    b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
LONG = {"model": "small", "prompt": "import", "max_tokens": 300, "ignore_eos": True}


def post(path: str, fields: object) -> bytes:
    body = json.dumps(fields).encode()
    return HEAD % (path.encode(), len(body)) + body


ASKED = post("/v1/completions", LONG)
SILENT = {
    "nothing": b"",
    "a part of a head": ASKED[:40],
    "a part of a body": ASKED[:-5],
    "a part of the next head": post("/tokenize", {"prompt": "a"}) + ASKED[:40],
    "all, and reads nothing": post("/detokenize", {"tokens": [1] * 1_000_000}),
}


def look(running: Running) -> None:
    """Look for those that did nothing, where the server does it."""
    has_looked = threading.Event()

    def work() -> None:
        running.server.stalled.look(running.server.server_state.connections)
        has_looked.set()

    running.server._loop.call_soon_threadsafe(work)
    assert has_looked.wait(60)


def wait_open(running: Running, count: int) -> None:
    ends = time.monotonic() + 60
    while len(running.server.server_state.connections) != count:
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.fixture
def quiet(running: Running) -> Running:
    """The server without connections of other tests."""
    running.server._loop.call_soon_threadsafe(
        lambda: [one.transport.abort() for one in running.server.server_state.connections]
    )
    wait_open(running, 0)
    return running


@pytest.mark.parametrize("sent", SILENT)
def test_who_does_nothing_is_let_go(quiet: Running, sent: str) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(quiet.server.address)
        client.sendall(SILENT[sent])
        wait_open(quiet, 1)
        num_looks, ends = 0, time.monotonic() + 60
        while quiet.server.server_state.connections:
            assert time.monotonic() < ends
            look(quiet)
            num_looks += 1
            time.sleep(0.05)  # for the answer, as far as there is one
    assert num_looks >= 2


def test_who_waits_or_reads_is_not(quiet: Running) -> None:
    host, port = quiet.server.address
    waits, reads = (http.client.HTTPConnection(host, port, timeout=60) for _ in range(2))
    headers = {"Content-Type": "application/json"}
    reads.request("POST", "/v1/completions", json.dumps({**LONG, "stream": True}), headers)
    streamed = reads.getresponse()
    waits.request("POST", "/v1/completions", json.dumps(LONG), headers)
    for _ in range(4):
        assert streamed.readline().startswith(b"data: ")
        look(quiet)
        assert streamed.readline() == b"\n"
    assert json.loads(waits.getresponse().read())["usage"]["completion_tokens"] == 300
    assert streamed.read().endswith(b"data: [DONE]\n\n")
    waits.close()
    reads.close()


def test_half_a_request_does_not_hold_up_the_end(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """uvicorn waited longer than for answers, and showed a traceback."""
    options = ServeOptions(model_name="small", drain_s=0.5)
    server = Running(lambda: LLM(folder, device="cpu"), options)
    with socket.create_connection(server.server.address) as client:
        client.sendall(SILENT["a part of a body"])
        wait_open(server, 1)
        time.sleep(0.1)
        server.end()
    assert "Cancel" not in capfd.readouterr().err
