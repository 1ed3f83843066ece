"""What serving costs over `LLM.generate`: the same prompts through both, interleaved.

The server runs in a process of its own, the clients here; the offline engine runs here as well, at
other times. Tokens a second of a round are those of all streams, from the first request's start to
the last one's end. The figure that counts is the ratio within a round; its median is reported.

    python benchmarks/serve_overhead.py --json benchmarks/results/serve_overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import hybridspec
from hybridspec import LLM, SamplingParams
from hybridspec.bundled import held_out_prompts
from hybridspec.serve.load import Load, Target, find_model, run_load, summary
from measured_commit import measured_commit


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled", help="folder or id (default bundled)")
    parser.add_argument("--device", default="cpu", help="of both engines (default cpu)")
    parser.add_argument("--dummy-weights", action="store_true", help="random weights")
    parser.add_argument("--streams", type=int, default=16, help="requests at a time (default 16)")
    parser.add_argument("--max-tokens", type=int, default=200, help="new tokens (default 200)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser.parse_args()


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[Target]:
    """A server in a process of its own, once its model is loaded."""
    command = [sys.executable, "-m", "hybridspec", "serve", "--port", "0", "--device", args.device]
    if args.model != "bundled":
        command += ["--model", args.model]
    command += ["--dummy-weights"] if args.dummy_weights else []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            target = Target(url=process.stderr.readline().split()[-1])
            while not asyncio.run(is_ready(target)):
                if process.poll() is not None:
                    raise SystemExit(process.stderr.read())
                time.sleep(0.2)
            yield target
        finally:
            process.terminate()


async def is_ready(target: Target) -> bool:
    body = {"prompt": "a", "max_tokens": 1}
    [timing], _ = await run_load(target, Load(bodies=[body], concurrency=1), lambda _: None)
    return timing.error is None


def main() -> int:
    args = arguments()
    options = {"device": args.device, "dummy_weights": args.dummy_weights}
    llm = LLM(args.model, **options)
    prompts = [prompt.text for prompt in held_out_prompts("code")]
    prompts = [prompts[i % len(prompts)] for i in range(args.streams)]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {"offline": [], "served": []}
    latencies = []
    with server(args) as target:
        fields = {"model": asyncio.run(find_model(target)), "temperature": 0, "ignore_eos": True,
                  "max_tokens": args.max_tokens}  # fmt: skip
        load = Load(bodies=[{**fields, "prompt": p} for p in prompts], concurrency=args.streams)
        for round_index in range(args.rounds + 1):  # the first one warms up
            start = time.perf_counter()
            llm.generate(prompts, params)
            offline_s = time.perf_counter() - start
            timings, served_s = asyncio.run(run_load(target, load, lambda _: None))
            found = summary(timings, served_s)
            if found["failed"]:
                print(f"requests failed: {found['errors']}", file=sys.stderr)
                return 1
            print(f"round {round_index}/{args.rounds}", file=sys.stderr)
            if round_index:
                rates["offline"].append(args.streams * args.max_tokens / offline_s)
                rates["served"].append(found["tokens_per_s"])
                latencies.append(found["first_token_ms"]["p50"])
    ratios = [s / o for s, o in zip(rates["served"], rates["offline"], strict=True)]
    result = {
        "benchmark": "serve_overhead",
        "hybridspec": hybridspec.__version__,
        "commit": measured_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": args.device,
        "model": args.model,
        "streams": args.streams,
        "max_tokens": args.max_tokens,
        "rounds": args.rounds,
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "served_over_offline": statistics.median(ratios),
        "first_token_ms": statistics.median(latencies),
    }
    for name, rate in result["tokens_per_second"].items():
        print(f"{name:<10}{rate:8.1f} tokens/s")
    print(f"served / offline {result['served_over_offline']:.3f}")
    line = json.dumps(result)
    if args.json:
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
