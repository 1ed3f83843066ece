"""`hybridspec bench-serve`: load on a running server, from this process."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridspec.bundled import held_out_prompts
from hybridspec.cli.loading import progress
from hybridspec.cli.usage import UsageError
from hybridspec.serve.load import Load, Target, Timing, find_model, run_load, summary
from hybridspec.serve.plot import distribution_svg

__all__ = ["run"]

_SERIES = (
    ("to the first token", "first_token_ms"),
    ("between pieces", "between_chunks_ms"),
    ("per token after it", "per_token_ms"),
    ("whole answer", "whole_ms"),
)


def run(arguments: argparse.Namespace) -> int:
    """Measure; returns 0, or 1 if a request failed."""
    target = Target(url=_url(arguments.url), key=_key(arguments.api_key_file))
    try:
        model = asyncio.run(find_model(target))
    except (OSError, ValueError) as error:
        raise UsageError(f"--url: {error}") from None
    load = Load(
        bodies=_bodies(arguments, model),
        concurrency=None if arguments.rate else arguments.concurrency,
        rate=arguments.rate,
        seed=arguments.seed,
    )
    timings, elapsed_s = _measured(target, load)
    found = {
        "url": target.url,
        "model": model,
        "max_tokens": arguments.max_tokens,
        "concurrency": load.concurrency,
        "rate": load.rate,
        **summary(timings, elapsed_s),
    }
    if arguments.plot is not None:
        Path(arguments.plot).write_text(_plot(timings, model), encoding="utf-8")
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        _show(found)
    return int(found["failed"] > 0)


def _url(given: str) -> str:
    if not given.startswith(("http://", "https://")):
        raise UsageError(f"--url: expected http://HOST:PORT, got {given!r}")
    return given.rstrip("/").removesuffix("/v1")


def _key(file: str | None) -> str | None:
    if file is None:
        return None
    keys = Path(file).read_text(encoding="utf-8").split()
    if not keys:
        raise UsageError(f"--api-key-file: {file} holds no key")
    return keys[0]


def _bodies(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    prompts = [prompt.text for prompt in held_out_prompts()]
    if arguments.prompts:
        prompts = arguments.prompts
    fields = {
        "model": model,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "ignore_eos": not arguments.use_eos,
    }
    bodies = []
    for i in range(arguments.num_requests):
        prompt = prompts[i % len(prompts)]
        content: dict[str, Any] = {"prompt": prompt}
        if arguments.chat:
            content = {"messages": [{"role": "user", "content": prompt}]}
        bodies.append({**fields, **content, "seed": arguments.seed + i})
    return bodies


def _measured(target: Target, load: Load) -> tuple[list[Timing], float]:
    done: list[Timing] = []
    with progress(f"0 of {len(load.bodies)} requests") as show:

        def on_done(timing: Timing) -> None:
            done.append(timing)
            failed = sum(one.error is not None for one in done)
            show(f"{len(done)} done, {failed} failed")

        return asyncio.run(run_load(target, load, on_done))


def _plot(timings: list[Timing], model: str) -> str:
    right = [timing for timing in timings if timing.error is None]
    series = {
        "first token": [1000 * timing.first_s for timing in right],
        "between pieces": [1000 * value for timing in right for value in timing.between_s],
        "whole answer": [1000 * (timing.ended - timing.started) for timing in right],
    }
    filled = {name: values for name, values in series.items() if values}
    if not filled:
        raise UsageError("--plot: expected a request that ended well, got none")
    return distribution_svg(filled, f"{model}: share of times below", "milliseconds")


def _show(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    way = f"{found['concurrency']} at a time" if found["rate"] is None else f"{found['rate']:g} /s"
    console.print(
        f"{found['requests']} requests ({way}), {found['failed']} failed, "
        f"{found['elapsed_s']:.1f} s"
    )
    console.print(f"{found['tokens_per_s']:.1f} tokens/s, {found['requests_per_s']:.2f} requests/s")
    table = Table("milliseconds", "median", "90 %", "99 %", box=None)
    for name, key in _SERIES:
        if found[key] is not None:
            table.add_row(name, *(f"{found[key][p]:.1f}" for p in ("p50", "p90", "p99")))
    console.print(table)
    for error, count in found["errors"].items():
        console.print(f"{count} x {error}", style="red")
