"""The measuring client: what it counts, against a running server and against broken ones."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.serving import Running
from hybridspec.cli import main
from hybridspec.serve.load import Load, Target, Timing, percentile, run_load, summary
from hybridspec.serve.plot import distribution_svg


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["bench-serve", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("way", [("--concurrency", "3"), ("--rate", "40"), ("--chat",)])
def test_load_on_a_server(
    running: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path, way: tuple[str, ...]
) -> None:
    plot = tmp_path / "plot.svg"
    words = ["--url", running.url, "--num-requests", "6", "--max-tokens", "9", "--json"]
    status, out, err = bench(capsys, *words, "--plot", str(plot), *way)
    found = json.loads(out)
    assert (status, err, found["failed"], found["model"]) == (0, "", 0, "small")
    assert found["generated_tokens"] == 54
    assert found["rate"] == (40.0 if "--rate" in way else None)
    for name in ("first_token_ms", "per_token_ms", "whole_ms"):
        times = found[name]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"]
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    running.wait_idle()


def test_the_table(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["def f", "--url", f"{running.url}/v1", "--num-requests", "2", "--max-tokens", "4"]
    status, out, _ = bench(capsys, *words)
    assert status == 0
    assert "2 requests (16 at a time), 0 failed" in out and "to the first token" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--url", "127.0.0.1"), "--url: expected http://HOST:PORT"),
        (("--url", "http://127.0.0.1:1"), "--url: "),
        (("--num-requests", "0"), "argument --num-requests: expected 1 to 1000000"),
        (("--rate", "0"), "argument --rate: expected a positive number"),
    ],
)
def test_wrong_calls(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    status, _, err = bench(capsys, *words)
    assert status == 2 and err.startswith(f"hybridspec: error: {message}")


@pytest.fixture
def broken() -> Iterator[Any]:
    """A server that answers each connection with the same bytes."""
    listening = socket.create_server(("127.0.0.1", 0))
    answers: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answers[0])

    thread = threading.Thread(target=serve)
    thread.start()
    yield answers, f"http://127.0.0.1:{listening.getsockname()[1]}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 429 Too Many\r\n\r\nfull", "status 429: full"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n", "choices"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "no"}}\n\n', "no"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata:", "bytes read"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "the answer ended early"),
        (b"", "no answer in HTTP came"),
    ],
)
def test_answers_that_are_none(broken: Any, answer: bytes, error: str) -> None:
    answers, url = broken
    answers.append(answer)
    load = Load(bodies=[{"prompt": "a"}] * 2, concurrency=2)
    timings, elapsed = asyncio.run(run_load(Target(url=url), load, lambda timing: None))
    found = summary(timings, elapsed)
    assert (found["failed"], found["tokens_per_s"]) == (2, 0)
    assert found["first_token_ms"] is None
    [message] = found["errors"]
    assert error in message


def test_numbers() -> None:
    assert percentile([3, 1, 2], 50) == 2 and percentile([5], 99) == 5
    assert percentile([0, 10], 90) == 9
    one = Timing(started=1.0, chunk_times=[1.5, 2.0, 3.0], ended=3.5, num_tokens=7)
    assert (one.first_s, one.between_s, one.per_token_s) == (0.5, [0.5, 1.0], 0.25)
    found = summary([one], 2.0)
    assert (found["tokens_per_s"], found["whole_ms"]["p50"]) == (3.5, 2500)


def test_a_plot_of_one_value() -> None:
    root = ElementTree.fromstring(distribution_svg({"a & b": [0.0]}, "<t>", "ms"))
    assert any(element.text == "a & b" for element in root.iter())
