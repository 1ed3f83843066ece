"""What goes wrong: bad requests, full queues, clients that leave, keys, and the server's end."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.bad_bodies import bad_requests
from helpers.serving import Running
from hybridspec import LLM, SamplingParams
from hybridspec.models import chat
from hybridspec.serve.fields import Limits
from hybridspec.serve.options import ServeOptions

LONG: dict[str, Any] = {"model": "small", "temperature": 1, "max_tokens": 3000, "seed": 1,
                        "extra_body": {"ignore_eos": True}}  # fmt: skip


def ask(
    running: Running, method: str, path: str, body: bytes = b"", headers: Any = None
) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=60)
    try:
        connection.request(method, path, body or None, headers or {})
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def check_shape(status: int, body: bytes) -> dict[str, Any]:
    assert 400 <= status < 500, (status, body)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert "Traceback" not in error["message"] and 'File "' not in error["message"]
    return error


def test_malformed_requests(running: Running) -> None:
    """Every one is a 4xx in the interface's shape, and none harms the next one."""
    for method, path, body, headers in bad_requests(seed=15, count=1000):
        status, answer, _ = ask(running, method, path, body, headers)
        check_shape(status, answer)
    running.wait_idle()
    assert running.client().completions.create(model="small", prompt="a", max_tokens=2)


def test_a_body_that_is_too_long(running: Running) -> None:
    body = b'{"model": "small", "prompt": "' + b"a" * (Limits().body_bytes + 1) + b'"}'
    headers = {"Content-Type": "application/json"}
    try:
        status, answer, _ = ask(running, "POST", "/v1/completions", body, headers)
    except (ConnectionError, http.client.HTTPException):
        return  # the server need not read what it will not take
    assert status == 413 and check_shape(status, answer)


def test_a_body_of_millions_of_lists(running: Running) -> None:
    """Told before they are made: that would take seconds, in which nobody else is served."""
    body = b'{"model": "small", "prompt": [' + b",".join([b"[]"] * 200_000) + b"]}"
    headers = {"Content-Type": "application/json"}
    status, answer, _ = ask(running, "POST", "/v1/completions", body, headers)
    check_shape(status, answer)
    message = json.loads(answer)["error"]["message"]
    assert status == 400
    assert message == "body: holds 200002 of [ and {, expected at most 131072"


def test_paths_that_tell_about_the_server(running: Running) -> None:
    assert ask(running, "GET", "/health")[0] == ask(running, "GET", "/ready")[0] == 200
    assert set(json.loads(ask(running, "GET", "/version")[1])) == {"version"}
    assert json.loads(ask(running, "GET", "/load")[1]) == {"server_load": 0}
    status, page, headers = ask(running, "GET", "/")
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert "default-src 'self'" in headers["Content-Security-Policy"]


def test_a_full_queue(running: Running) -> None:
    """80 fit; what came before goes on, and there is room again when it has gone."""
    client = running.client()
    streams = [
        client.completions.create(prompt="import", n=16, stream=True, **LONG) for _ in range(5)
    ]
    next(streams[0])
    with pytest.raises(openai.RateLimitError, match="the queue is full \\(80 of 80") as full:
        client.completions.create(prompt="a", **LONG)
    assert int(full.value.response.headers["retry-after"]) >= 1
    for stream in streams:
        stream.close()
    running.wait_idle()
    assert client.completions.create(model="small", prompt="a", max_tokens=1)


def test_clients_that_leave(running: Running) -> None:
    """Abruptly, at any moment, streaming or not; nothing of them stays."""
    rng = random.Random(3)
    host, port = running.server.address
    for i in range(200):
        fields = {"model": "small", "prompt": "import os", "max_tokens": 2000, "ignore_eos": True,
                  "temperature": 1, "stream": bool(i % 2), "n": rng.choice([1, 3])}  # fmt: skip
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        with socket.create_connection((host, port)) as connection:
            connection.sendall(head + body[: rng.choice([len(body), len(body), 10])])
            time.sleep(rng.random() * 0.02)
            if rng.random() < 0.5:  # with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    running.wait_idle()
    assert json.loads(ask(running, "GET", "/load")[1]) == {"server_load": 0}


def test_a_client_that_leaves_two_requests_is_no_news(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn does not see that one go that sent the next request already, until it writes."""
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
    fields = {"prompt": "import os", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(running.server.address) as connection:
        connection.sendall(head + body + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(100)
    running.wait_idle()
    assert ask(running, "GET", "/health")[0] == 200
    assert not caplog.records


def test_many_streams_equal_the_offline_tokens(running: Running) -> None:
    offline = LLM("bundled", device="cpu")
    prompts = [f"def function_{i}(" for i in range(32)]
    options = {"temperature": 0.8, "seed": 4, "max_tokens": 30}
    right = [r.outputs[0].text for r in offline.generate(prompts, SamplingParams(**options))]
    client = running.client()

    def stream(prompt: str) -> str:
        chunks = client.completions.create(model="small", prompt=prompt, stream=True, **options)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert list(pool.map(stream, prompts)) == right
    running.wait_idle()


def test_slow_templates_take_no_threads_of_others(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than the server has threads for what takes time."""
    has_begun, goes_on = threading.Event(), threading.Event()

    def slow(template: str, variables: object) -> str:
        has_begun.set()
        assert goes_on.wait(120)
        return "a"

    monkeypatch.setattr(chat, "run_template", slow)
    client, asked = running.client(), {"model": "small", "max_tokens": 1}
    messages = [{"role": "user", "content": "a"}]
    with concurrent.futures.ThreadPoolExecutor(45) as pool:
        chats = [
            pool.submit(client.chat.completions.create, messages=messages, **asked)
            for _ in range(45)
        ]
        assert has_begun.wait(120)
        time.sleep(0.5)  # the others come
        try:
            assert client.with_options(timeout=30).completions.create(prompt="a", **asked).choices
        finally:
            goes_on.set()
        assert all(one.result().choices for one in chats)
    running.wait_idle()


def test_texts_of_tokens_are_made_beside_the_event_loop(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt may have millions of them."""
    tokenizer, threads = running.llm.tokenizer, []
    decode = tokenizer.decode

    def spy(*arguments: Any, **options: Any) -> str:
        threads.append(threading.current_thread())
        return decode(*arguments, **options)

    monkeypatch.setattr(tokenizer, "decode", spy)
    body = json.dumps({"prompt": "import os", "return_token_strs": True}).encode()
    headers = {"Content-Type": "application/json"}
    status, answer, _ = ask(running, "POST", "/tokenize", body, headers)
    assert status == 200 and "".join(json.loads(answer)["token_strs"]).endswith("import os")
    assert threads and running.thread not in threads


def test_a_failed_step_ends_its_requests_and_no_others(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = running.client()
    engine = running.llm._engine
    stream = client.completions.create(prompt="import", stream=True, **LONG)
    next(stream)

    def broken(*arguments: object) -> None:
        raise MemoryError("no room at all")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode", broken)
        with pytest.raises(openai.APIError, match="no room at all"):
            list(stream)
        running.wait_idle()
    assert client.completions.create(model="small", prompt="a", max_tokens=2)


def test_steps_that_all_fail_give_up_what_waits(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was admitted, so no step can take it along."""

    def broken() -> None:
        raise RuntimeError("no admission at all")

    with monkeypatch.context() as patch:
        patch.setattr(running.llm._engine.scheduler, "admit", broken)
        with pytest.raises(openai.InternalServerError, match="no admission at all"):
            running.client().completions.create(model="small", prompt="a", max_tokens=2)
    running.wait_idle()
    assert running.client().completions.create(model="small", prompt="a", max_tokens=2)
    assert ask(running, "GET", "/health")[0] == 200


def test_a_stream_that_cannot_be_counted_ends_alone(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(running.api.stepper, "_on_steps", broken)
        with pytest.raises(openai.InternalServerError, match="a bug"):
            running.client().completions.create(model="small", prompt="a", max_tokens=2)
    running.wait_idle()
    assert running.client().completions.create(model="small", prompt="a", max_tokens=2)


@pytest.mark.slow
def test_64_streams_for_two_minutes(running: Running) -> None:
    """None fails, each equals the offline tokens, and nothing is left behind."""
    offline = LLM("bundled", device="cpu")
    prompts = [f"class Thing{i}:\n    def " for i in range(64)]
    options = {"temperature": 0.9, "seed": 8, "max_tokens": 60}
    right = [r.outputs[0].text for r in offline.generate(prompts, SamplingParams(**options))]
    ends = time.monotonic() + 120
    clients = [running.client() for _ in prompts]

    def stream(i: int) -> int:
        count = 0
        while time.monotonic() < ends:
            chunks = clients[i].completions.create(
                model="small", prompt=prompts[i], stream=True, **options
            )
            assert "".join(chunk.choices[0].text for chunk in chunks) == right[i]
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        assert min(pool.map(stream, range(64))) >= 1
    running.wait_idle()


@pytest.fixture
def guarded(folder: Path) -> Iterator[Running]:
    options = ServeOptions(model_name="small", api_keys=["first", "sécond"], drain_s=0.3)
    server = Running(lambda: LLM(folder, device="cpu"), options)
    yield server
    server.end()


def test_keys(guarded: Running) -> None:
    assert ask(guarded, "GET", "/health")[0] == 200
    for key in ("", "firs", "first1", "First", "none"):
        status, answer, headers = ask(
            guarded, "GET", "/v1/models", headers={"Authorization": f"Bearer {key}"}
        )
        error = check_shape(status, answer)
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert headers["WWW-Authenticate"] == "Bearer"
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert ask(guarded, "POST", path, b"{}")[0] == 401
    assert ask(guarded, "GET", "/v1/models", headers={"Authorization": "Basic first"})[0] == 401
    assert guarded.client("first").models.list().data
    with pytest.raises(openai.AuthenticationError):
        guarded.client("wrong").models.list()


def test_the_end_tells_those_who_are_not_done(guarded: Running) -> None:
    """One request is short enough to finish, one is not, and new ones are turned away."""
    client = guarded.client("first")
    stream = client.completions.create(prompt="import", stream=True, **LONG)
    next(stream)
    guarded.server.end()
    with pytest.raises(openai.APIError, match="the server is going down"):
        list(stream)
    guarded.thread.join(timeout=120)
    assert not guarded.thread.is_alive()
    assert not guarded.llm._engine.has_work and not guarded.llm._engine.allocator.num_live


def test_a_second_signal_ends_at_once(folder: Path) -> None:
    """Who runs is told, as at the end of the time that there would have been."""
    options = ServeOptions(model_name="small", drain_s=300)
    server = Running(lambda: LLM(folder, device="cpu"), options)
    stream = server.client().completions.create(prompt="import", stream=True, **LONG)
    next(stream)
    for _ in range(2):
        server.server.end()
    with pytest.raises(openai.APIError, match="the server is going down"):
        list(stream)
    server.thread.join(timeout=60)
    assert not server.thread.is_alive() and not server.server.force_exit
    assert not server.llm._engine.has_work and not server.llm._engine.allocator.num_live


def test_sigterm_lets_what_runs_finish(folder: Path, tmp_path: Path) -> None:
    """In a process of its own; the exit status is 0 and nothing but the address is printed."""
    command = [sys.executable, "-m", "hybridspec", "serve", "--port", "0", "--device", "cpu"]
    command += ["--model", str(folder), "--served-model-name", "small", "--drain", "300"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = process.stderr.readline().removeprefix("listening on ").strip()
            wait_ready(process, address)
            options = {**LONG, "max_tokens": 100}
            with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
                stream = client.completions.create(prompt="import", stream=True, **options)
                next(stream)
                os.kill(process.pid, signal.SIGTERM)
                assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
            assert process.wait(timeout=400) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def wait_ready(process: subprocess.Popen[str], address: str) -> None:
    ends = time.monotonic() + 300
    while True:
        assert process.poll() is None and time.monotonic() < ends
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
        try:
            connection.request("GET", "/ready")
            response = connection.getresponse()
            response.read()
        finally:
            connection.close()
        if response.status == 200:
            return
        assert response.status == 503
        time.sleep(0.2)
