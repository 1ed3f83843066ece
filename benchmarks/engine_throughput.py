"""Tokens per second of the whole engine at a published geometry with made-up weights.

Each case is a fresh engine: prompts of random tokens, decoding to the end of the budget, ends
ignored. Decode throughput counts the steps behind the first `--skip` ones, by the wall clock; time
to the first token is taken from the same run. With drafts, acceptance is forced (`--acceptance`),
so what is written is synthetic, but every part of a step runs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from geometries import GEOMETRIES, write_geometry
from hybridspec import LLM, SamplingParams
from measured_commit import measured_commit


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=[*GEOMETRIES, "bundled"], default="9b")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.85, 0.7, 0.55])
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip", type=int, default=4, help="steps that are not counted")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--draft-vocab", type=int, help="words that drafts are chosen from")
    parser.add_argument("--eager", action="store_true", help="without graphs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams, skip: int) -> dict[str, float]:
    """Decode one batch; rates of its steps."""
    engine = llm._engine
    requests = [engine.make_request(prompt, params) for prompt in prompts]
    started = time.perf_counter()
    for request in requests:
        engine.submit(request)
    first = last_first = None
    times: list[tuple[float, int]] = []
    while engine.has_work:
        engine.step()
        now = time.perf_counter() - started
        done = sum(request.num_generated for request in requests)
        if first is None and done:
            first = now
        if last_first is None and all(request.num_generated for request in requests):
            last_first = now
        times.append((now, done))
    steady = [i for i, (_, done) in enumerate(times) if done >= len(prompts)]
    begin = steady[min(skip, len(steady) - 2)]
    # Requests end at different steps where drafts are taken: count while all of them run.
    full = [i for i in steady if times[i][1] < len(prompts) * params.max_tokens * 0.9]
    end = max(full[-1] if full else begin + 1, begin + 1)
    seconds, tokens = times[end][0] - times[begin][0], times[end][1] - times[begin][1]
    steps = end - begin
    return {
        "tokens_per_s": tokens / seconds,
        "step_ms": seconds / steps * 1e3,
        "tokens_per_step": tokens / steps / len(prompts),
        "first_token_ms": (first or 0.0) * 1e3,
        "last_first_token_ms": (last_first or 0.0) * 1e3,
    }


def load(args: argparse.Namespace, model: Any, drafts: int) -> LLM:
    """A fresh engine for one number of drafts."""
    return LLM(
        model,
        draft_tokens=drafts,
        device=args.device,
        dummy_weights=args.geometry != "bundled",
        acceptance=args.acceptance if drafts else None,
        draft_vocab=range(args.draft_vocab) if args.draft_vocab and drafts else None,
        enforce_eager=args.eager,
        max_model_len=max(args.prompt + args.tokens + 16, 512),
        max_num_seqs=max(args.requests),
    )


def measure(args: argparse.Namespace, llm: LLM, prompts: list[list[int]]) -> dict[str, float | int]:
    """Medians over the rounds, behind one that warms up, and what the graphs take."""
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        seed=1,
        max_tokens=args.tokens,
        ignore_eos=True,
    )
    run(llm, prompts, params, args.skip)
    found = [run(llm, prompts, params, args.skip) for _ in range(args.rounds)]
    row = {key: statistics.median(one[key] for one in found) for key in found[0]}
    graphs = llm._engine.runner.graphs
    return row | {"graph_mib": 0 if graphs is None else graphs.nbytes >> 20}


def show(row: dict[str, Any]) -> None:
    """Print a line."""
    print(
        f"B={row['requests']:<4} k={row['drafts']}  {row['tokens_per_s']:9.0f} tok/s  "
        f"{row['step_ms']:7.3f} ms a step  {row['tokens_per_step']:.2f} tokens a step  "
        f"first token {row['first_token_ms']:.0f} ms, last first "
        f"{row['last_first_token_ms']:.0f} ms  start {row['start_s']:.0f} s, graphs "
        f"{row['graph_mib']} MiB",
        flush=True,
    )


def main() -> int:
    args = arguments()
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        model: Any = "bundled"
        vocab = 250
        if args.geometry != "bundled":
            model, vocab = write_geometry(Path(name), args.geometry, args.vocab), args.vocab
        for drafts in args.drafts:
            started = time.perf_counter()
            llm = load(args, model, drafts)
            start_s = time.perf_counter() - started
            for count in args.requests:
                prompts = [
                    [rng.randrange(1, vocab) for _ in range(args.prompt)] for _ in range(count)
                ]
                row = measure(args, llm, prompts)
                rows.append(row | {"requests": count, "drafts": drafts, "start_s": start_s})
                show(rows[-1])
            del llm
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report = {
        "benchmark": "engine_throughput",
        **{k: v for k, v in vars(args).items() if k != "json"},
        "device": device,
        "torch": torch.__version__,
        "commit": measured_commit(),
        "rows": rows,
    }
    text = json.dumps(report)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
