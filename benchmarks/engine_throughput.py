"""Tokens per second of the whole engine at a published geometry with made-up weights.

Every mode is a fresh engine: prompts of random tokens, decoding to the end of the budget, ends
ignored. Decode throughput counts the steps behind the first `--skip` ones, by the wall clock, and
on a GPU such a step is split into parts whose sum it is; time to the first token is taken from the
same run. Modes: "plain"; "fixed", every draft verified; "budget", at most `--verify-rows` rows a
step; "snapshots", which is composed: the step of "fixed" with the time of a kernel that writes the
state after every row (`state_snapshots.py`) in place of its recurrent part, since an engine with
snapshots would serve nothing else; "transformers", its `generate` with flash-linear-attention. With
drafts, acceptance is forced (`--acceptance`), so what is written is synthetic, but every part runs.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from floors import READ_RATE, plain_floor_ms, product_rate
from geometries import GEOMETRIES, write_geometry
from hybridspec import LLM, SamplingParams
from measured_commit import measured_commit
from step_parts import RECURRENT, step_bytes, step_parts

MODES = ("plain", "fixed", "budget", "snapshots", "transformers")
Prompts = list[list[int]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=[*GEOMETRIES, "bundled"], default="9b")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["plain", "fixed"])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--verify-rows", type=int, default=512, help='of mode "budget"')
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.85, 0.7, 0.55])
    parser.add_argument("--acceptance-spread", type=float, default=0.0)
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


def run(llm: LLM, prompts: Prompts, params: SamplingParams, skip: int) -> dict[str, float]:
    """Decode one batch; rates of its steps."""
    engine = llm._engine
    requests = [engine.make_request(prompt, params) for prompt in prompts]
    started = time.perf_counter()
    for request in requests:
        engine.submit(request)
    first = last_first = None
    times: list[tuple[float, int]] = []  # while all of them run
    while engine.has_work:
        engine.step()
        now = time.perf_counter() - started
        counts = [request.num_generated for request in requests]
        if first is None and any(counts):
            first = now
        if last_first is None and all(counts):
            last_first = now
        if all(counts) and not any(request.finish_reason for request in requests):
            times.append((now, sum(counts)))
    begin, end = min(skip, len(times) - 2), len(times) - 1
    if begin < 0:
        raise SystemExit(f"tokens: {params.max_tokens} are too few, some end before others begin")
    seconds, tokens = times[end][0] - times[begin][0], times[end][1] - times[begin][1]
    steps = end - begin
    return {
        "tokens_per_s": tokens / seconds,
        "step_ms": seconds / steps * 1e3,
        "tokens_per_step": tokens / steps / len(prompts),
        "first_token_ms": (first or 0.0) * 1e3,
        "last_first_token_ms": (last_first or 0.0) * 1e3,
    }


def load(args: argparse.Namespace, model: Any, mode: str) -> LLM:
    """A fresh engine for a mode."""
    drafts = 0 if mode == "plain" else args.drafts
    return LLM(
        model,
        draft_tokens=drafts,
        verify_rows=args.verify_rows if mode == "budget" else None,
        device=args.device,
        dummy_weights=args.geometry != "bundled",
        acceptance=args.acceptance if drafts else None,
        acceptance_spread=args.acceptance_spread if drafts else 0.0,
        draft_vocab=range(args.draft_vocab) if args.draft_vocab and drafts else None,
        enforce_eager=args.eager,
        enable_prefix_caching=False,  # rounds repeat their prompts
        max_model_len=context_length(args, max(args.requests), drafts),
        max_num_seqs=max(args.requests),
    )


def most_tokens(args: argparse.Namespace, count: int, drafts: int) -> int:
    """New tokens of each of `count` requests: the first to begin must not end before the last.

    Beside requests that decode two or more prompts begin in a step.
    """
    return args.tokens + count // 2 * (drafts + 1)


def context_length(args: argparse.Namespace, count: int, drafts: int) -> int:
    """Return `max_model_len` for `count` requests: their prompt, new tokens and some more."""
    return max(args.prompt + most_tokens(args, count, drafts) + 16, 512)


def measure(args: argparse.Namespace, llm: LLM, prompts: Prompts, mode: str) -> dict[str, Any]:
    """Medians over the rounds, behind one that warms up; the parts of a step, and its floor."""
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        seed=1,
        max_tokens=most_tokens(args, len(prompts), llm.config.draft_tokens),
        ignore_eos=True,
    )
    run(llm, prompts, params, args.skip)
    found = [run(llm, prompts, params, args.skip) for _ in range(args.rounds)]
    row: dict[str, Any] = {key: statistics.median(one[key] for one in found) for key in found[0]}
    info, graphs = llm.describe(), llm._engine.runner.graphs
    row["bytes_per_request"] = {**info.request_bytes, "keys and values of a token": 0}
    row["bytes_per_request"]["keys and values of a token"] = info.kv_bytes_per_token
    row["graph_mib"] = 0 if graphs is None else graphs.nbytes >> 20
    if graphs is not None:
        row["parts_ms"] = step_parts(llm, prompts, params, row["step_ms"])
    if mode == "plain" and llm.config.device != "cpu":
        row |= step_bytes(llm, prompts, params)
        floor_ms = (row["dense_bytes"] + row["expert_bytes"]) / READ_RATE * 1e3
        row |= {"floor_ms": floor_ms, "share_of_bytes": floor_ms / row["step_ms"]}
        if llm.model_config.moe is None:
            rate = product_rate(llm._engine.model)
            context = args.prompt + params.max_tokens / 2
            floor_ms = plain_floor_ms(llm, len(prompts), context, rate)
            row |= {"product_rate": rate, "sum_of_floors_ms": floor_ms}
            row["share_of_floors"] = floor_ms / row["step_ms"]
    return row


def with_snapshots(llm: LLM, fixed: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The row of an engine whose recurrent layers write the state after every row."""
    from state_snapshots import Snapshots

    gdn = llm.model_config.gdn
    layers = llm.model_config.layer_kinds.count("gdn")
    state_dtype = getattr(torch, llm.config.state_dtype)
    step = Snapshots(
        fixed["requests"], args.drafts + 1, gdn.num_key_heads, gdn.num_value_heads, state_dtype
    )
    step.check()
    us, _ = step.time(20)
    parts = {**fixed["parts_ms"], RECURRENT: us * layers / 1e3}
    step_ms = sum(parts.values())
    sizes = llm.describe()
    return {
        **fixed,
        "mode": "snapshots",
        "is_composed": True,
        "parts_ms": parts,
        "step_ms": step_ms,
        "tokens_per_s": fixed["tokens_per_s"] * fixed["step_ms"] / step_ms,
        "kernel_us": us,
        "bytes_per_request": {
            "states": sizes.snapshot_bytes,
            "keys and values of a token": sizes.kv_bytes_per_token,
        },
    }


def show(row: dict[str, Any]) -> None:
    """Print a line, and the parts of the step below it."""
    line = (
        f"{row['mode']:12} B={row['requests']:<4} {row['tokens_per_s']:9.0f} tok/s  "
        f"{row['step_ms']:7.3f} ms a step  {row['tokens_per_step']:.2f} tokens a step"
    )
    if "last_first_token_ms" in row:
        line += f"  last first token {row['last_first_token_ms']:.0f} ms"
    if "share_of_bytes" in row:
        line += f"  {row['share_of_bytes']:.2f} of its bytes, {row['experts_hit']:.0f} experts"
    if "share_of_floors" in row:
        line += f", {row['share_of_floors']:.2f} of the sum of its parts' floors"
    print(line, flush=True)
    parts = row.get("parts_ms", {})
    if parts:
        print("  " + ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items()), flush=True)


def free() -> None:
    """Give a dropped engine's memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_mode(
    args: argparse.Namespace, model: Any, mode: str, batches: Sequence[Prompts]
) -> list[dict[str, Any]]:
    """All numbers of requests of one mode; with "snapshots" beside "fixed" where asked for."""
    started = time.perf_counter()
    llm = load(args, model, mode)
    start_s = time.perf_counter() - started
    rows = []
    for prompts in batches:
        row = measure(args, llm, prompts, mode)
        rows.append({"mode": mode, "requests": len(prompts), "start_s": start_s, **row})
        show(rows[-1])
        if mode == "fixed" and "snapshots" in args.modes and "parts_ms" in row:
            rows.append(with_snapshots(llm, rows[-1], args))
            show(rows[-1])
    del llm
    free()
    return rows


def main() -> int:
    args = arguments()
    rng = random.Random(0)
    vocab = 250 if args.geometry == "bundled" else args.vocab
    batches = [
        [[rng.randrange(1, vocab) for _ in range(args.prompt)] for _ in range(count)]
        for count in args.requests
    ]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        model: Any = "bundled"
        if args.geometry != "bundled":
            model = write_geometry(Path(name), args.geometry, args.vocab)
        for mode in args.modes:
            if mode == "snapshots" or (mode == "transformers" and not _has_transformers()):
                continue
            if mode == "transformers":
                from transformers_engine import run_transformers

                rows += run_transformers(model, batches, args.tokens, show)
                free()
                continue
            rows += run_mode(args, model, mode, batches)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report = {
        "benchmark": "engine_throughput",
        **{k: v for k, v in vars(args).items() if k != "json"},
        "is_synthetic": args.geometry != "bundled" or args.modes != ["plain"],
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


def _has_transformers() -> bool:
    missing = [n for n in ("transformers", "fla") if importlib.util.find_spec(n) is None]
    if missing:
        print(f"transformers  not run: {' and '.join(missing)} not installed", flush=True)
    return not missing


if __name__ == "__main__":
    sys.exit(main())
