"""Load on a server and its latencies: the measuring side of `hybridspec bench-serve`.

Speaks plain HTTP by itself, so that measuring needs none of the server's packages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Load", "Target", "Timing", "find_model", "percentile", "run_load", "summary"]

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server.

    Attributes:
        url: where it answers, without /v1.
        key: its key, if it asks for one.
        timeout_s: most seconds for one answer.
    """

    url: str
    key: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked for.

    Attributes:
        bodies: fields of each request, in order.
        concurrency: requests that run at a time; None with `rate`.
        rate: requests that begin a second, at random moments; None with `concurrency`.
        seed: of these moments.
    """

    bodies: Sequence[dict[str, Any]]
    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0


@dataclass(slots=True)
class Timing:
    """What one request saw; times by `time.perf_counter`.

    Attributes:
        started: when it was sent.
        chunk_times: when each piece of text came.
        ended: when it was over.
        num_tokens: tokens generated, by the server's count.
        error: what went wrong, None if nothing.
    """

    started: float
    chunk_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_tokens: int = 0
    error: str | None = None

    @property
    def first_s(self) -> float:
        return self.chunk_times[0] - self.started

    @property
    def between_s(self) -> list[float]:
        times = self.chunk_times
        return [later - sooner for sooner, later in zip(times, times[1:], strict=False)]

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds for each token after the first."""
        if self.num_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.num_tokens - 1)


@contextlib.asynccontextmanager
async def _exchange(
    target: Target, method: str, path: str, body: bytes = b""
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """Send one request on a connection of its own; yield the status and lines of the body."""
    parts = urllib.parse.urlsplit(target.url)
    is_secure = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname,
        parts.port or (443 if is_secure else 80),
        ssl=ssl.create_default_context() if is_secure else None,
        limit=1 << 24,
    )
    key = f"Authorization: Bearer {target.key}\r\n" if target.key else ""
    head = (
        f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        words = (await reader.readline()).split()
        if len(words) < 2 or not words[1].isdigit():
            raise ValueError("no answer in HTTP came")
        is_chunked = False
        while (line := await reader.readline()) not in (b"\r\n", b""):
            is_chunked |= line.lower().replace(b" ", b"") == b"transfer-encoding:chunked\r\n"
        yield int(words[1]), _lines(reader, is_chunked=is_chunked)
    finally:
        writer.close()


async def _lines(reader: asyncio.StreamReader, *, is_chunked: bool) -> AsyncIterator[bytes]:
    rest = b""
    while True:
        if is_chunked:
            size = int((await reader.readline()).partition(b";")[0], 16)
            piece = await reader.readexactly(size) if size else b""
            await reader.readline()
        else:
            piece = await reader.read(1 << 16)
        if not piece:
            break
        *whole, rest = (rest + piece).split(b"\n")
        for one in whole:
            yield one
    if rest:
        yield rest


async def find_model(target: Target) -> str:
    """Return the name of the model that a server serves.

    Raises:
        OSError, ValueError: if it does not answer as such servers do.
    """
    async with _exchange(target, "GET", "/v1/models") as (status, lines):
        text = b"\n".join([line async for line in lines])
    if status != 200:
        raise ValueError(f"{target.url}: expected the models, got status {status}")
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{target.url}: expected a list of models") from None


async def _one(target: Target, body: dict[str, Any]) -> Timing:
    timing = Timing(time.perf_counter())
    try:
        async with asyncio.timeout(target.timeout_s):
            await _watch(target, body, timing)
    except TimeoutError:
        timing.error = f"no end within {target.timeout_s:g} s"
    except (OSError, ValueError, LookupError, EOFError) as error:
        timing.error = str(error) or type(error).__name__
    timing.ended = time.perf_counter()
    return timing


async def _watch(target: Target, body: dict[str, Any], timing: Timing) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
    is_done = False
    async with _exchange(target, "POST", path, json.dumps(wanted).encode()) as (status, lines):
        async for line in lines:
            now = time.perf_counter()
            if status != 200:
                raise ValueError(f"status {status}: {line[:200].decode(errors='replace')}")
            if line == b"data: [DONE]":
                is_done = True
            elif line.startswith(b"data: "):
                _note(json.loads(line[6:]), now, timing)
    if not is_done or not timing.chunk_times:
        raise ValueError("the answer ended early")


def _note(chunk: dict[str, Any], now: float, timing: Timing) -> None:
    if "error" in chunk:
        raise ValueError(str(chunk["error"]["message"]))
    if chunk.get("usage"):
        timing.num_tokens = chunk["usage"]["completion_tokens"]
    if any(_has_text(choice) for choice in chunk["choices"]):
        timing.chunk_times.append(now)


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    kinds = ("content", "reasoning", "tool_calls")
    return bool(choice.get("text")) or any(delta.get(kind) for kind in kinds)


async def run_load(
    target: Target, load: Load, on_done: Callable[[Timing], None]
) -> tuple[list[Timing], float]:
    """Send all requests.

    Args:
        target: where to.
        load: what and when.
        on_done: told of each request that is over.

    Returns:
        What each saw, in the order of the requests, and the seconds that all took.
    """
    gate = asyncio.Semaphore(load.concurrency or len(load.bodies))
    rng = random.Random(load.seed)
    started = time.perf_counter()

    async def one(body: dict[str, Any]) -> Timing:
        async with gate:
            timing = await _one(target, body)
        on_done(timing)
        return timing

    tasks, due = [], started
    for body in load.bodies:
        if load.rate is not None:
            due += rng.expovariate(load.rate)
            await asyncio.sleep(max(due - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(one(body)))
    timings = await asyncio.gather(*tasks)
    return timings, time.perf_counter() - started


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that so many percent do not exceed, interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(timings: Sequence[Timing], elapsed_s: float) -> dict[str, Any]:
    """Return counts, rates and percentiles in milliseconds."""
    right = [timing for timing in timings if timing.error is None]
    errors: dict[str, int] = {}
    for timing in timings:
        if timing.error is not None:
            errors[timing.error] = errors.get(timing.error, 0) + 1
    tokens = sum(timing.num_tokens for timing in right)
    series = {
        "first_token_ms": [timing.first_s for timing in right],
        "between_chunks_ms": [value for timing in right for value in timing.between_s],
        "per_token_ms": [v for timing in right if (v := timing.per_token_s) is not None],
        "whole_ms": [timing.ended - timing.started for timing in right],
    }
    return {
        "requests": len(timings),
        "failed": len(timings) - len(right),
        "errors": errors,
        "elapsed_s": elapsed_s,
        "generated_tokens": tokens,
        "tokens_per_s": tokens / elapsed_s,
        "requests_per_s": len(right) / elapsed_s,
        **{
            name: {f"p{p}": 1000 * percentile(values, p) for p in PERCENTILES} if values else None
            for name, values in series.items()
        },
    }
