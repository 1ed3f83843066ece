"""What exactness bit for bit costs: two engines with the same drafts, one fast, one exact, in turn.

Sizes are those of a published geometry with made-up weights. Acceptance is forced, so what is
written is synthetic, but every part of a step runs. Before anything is timed, the exact engine's
drafts are judged as usual for a few prompts: its tokens have to be those of a plain exact engine.

    python benchmarks/exact_cost.py --json benchmarks/results/exact_cost_h200.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from engine_throughput import context_length, free, most_tokens, run
from geometries import GEOMETRIES, write_geometry
from hybridspec import LLM, SamplingParams
from measured_commit import measured_commit
from step_parts import step_parts

MODES = ("tokens", "bitwise")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=[*GEOMETRIES, "bundled"], default="9b")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.85, 0.7, 0.55])
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    return parser


def make(args: argparse.Namespace, model: Any, num_seqs: int, **options: Any) -> LLM:
    """An engine for so many requests, which leaves room for another one."""
    return LLM(
        model,
        dummy_weights=args.geometry != "bundled",
        device=args.device,
        enable_prefix_caching=False,  # rounds repeat their prompts
        max_model_len=context_length(args, num_seqs, args.drafts),
        max_num_seqs=num_seqs,
        **options,
    )


def count_differing(args: argparse.Namespace, model: Any, prompts: list[list[int]]) -> int:
    """Count tokens of the exact engine that drafts change."""
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    outputs = []
    for drafts in (0, args.drafts):
        llm = make(args, model, len(prompts), exact="bitwise", draft_tokens=drafts)
        results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
        outputs.append([token for result in results for token in result.outputs[0].token_ids])
        del llm
        free()
    return sum(a != b for a, b in zip(*outputs, strict=True))


def measure(args: argparse.Namespace, model: Any, vocab: int) -> list[dict[str, Any]]:
    """Rates of both engines by number of requests, medians over rounds taken in turn."""
    rng = random.Random(0)
    engines = {
        mode: make(
            args, model, max(args.requests), exact=mode, draft_tokens=args.drafts,
            acceptance=args.acceptance,
        )
        for mode in MODES
    }  # fmt: skip
    rows = []
    for count in args.requests:
        most = most_tokens(args, count, args.drafts)
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        prompts = [[rng.randrange(1, vocab) for _ in range(args.prompt)] for _ in range(count)]
        found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for _ in range(args.rounds + 1):  # the first one warms up
            for mode, llm in engines.items():
                found[mode].append(run(llm, prompts, params, 4))
        row: dict[str, Any] = {"requests": count}
        for mode, rounds in found.items():
            row[mode] = {key: statistics.median(r[key] for r in rounds[1:]) for key in rounds[0]}
            if engines[mode]._engine.runner.graphs is not None:
                row[mode]["parts_ms"] = step_parts(
                    engines[mode], prompts, params, row[mode]["step_ms"]
                )
        rows.append(row)
        show(row)
    return rows


def show(row: dict[str, Any]) -> None:
    """Print what is left of the fast engine's rate, and what of it drafts and steps take."""
    fast, exact = row["tokens"], row["bitwise"]
    ratios = {key: exact[key] / fast[key] for key in ("tokens_per_s", "tokens_per_step", "step_ms")}
    print(
        f"B={row['requests']:<4} {fast['tokens_per_s']:8.0f} -> {exact['tokens_per_s']:8.0f} tok/s "
        f"{ratios['tokens_per_s']:.3f} x  tokens a step {fast['tokens_per_step']:.2f} -> "
        f"{exact['tokens_per_step']:.2f} {ratios['tokens_per_step']:.3f} x  step "
        f"{fast['step_ms']:.2f} -> {exact['step_ms']:.2f} ms {ratios['step_ms']:.3f} x",
        flush=True,
    )
    for part in sorted({*fast.get("parts_ms", {}), *exact.get("parts_ms", {})}):
        times = [one["parts_ms"].get(part, 0.0) for one in (fast, exact)]
        print(f"    {part:24} {times[0]:7.3f} -> {times[1]:7.3f} ms", flush=True)


def main() -> int:
    args = parser().parse_args()
    with tempfile.TemporaryDirectory() as name:
        model: Any = "bundled"
        vocab = 250
        if args.geometry != "bundled":
            model, vocab = write_geometry(Path(name), args.geometry, args.vocab), args.vocab
        prompts = [[3 + i, *range(20)] for i in range(3)]
        differing = count_differing(args, model, prompts)
        if differing:
            raise SystemExit(f"exact engine: drafts change {differing} tokens")
        rows = measure(args, model, vocab)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report = {
        "benchmark": "exact_cost",
        **{key: value for key, value in vars(args).items() if key != "json"},
        "device": device,
        "torch": torch.__version__,
        "commit": measured_commit(),
        "differing_tokens": differing,
        "rows": rows,
    }
    text = json.dumps(report)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
