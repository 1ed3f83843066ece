"""Prompts beside requests that decode, prompts that begin alike, and what a request holds.

Three questions at a published geometry with made-up weights:

- How long do requests that decode wait for their next tokens while a long prompt is processed?
- How much sooner do requests that share a prompt get their first tokens than others as long?
- How many bytes does a request hold, part by part, in copies of its fp32 states?

Tokens are checked first: with reuse and beside a prompt they are those of the same requests alone.
Where two tokens nearly tie, batches may decide otherwise on a GPU; such requests are counted.
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

from floors import product_rate, prompt_share
from geometries import GEOMETRIES, write_geometry
from hybridspec import LLM, SamplingParams
from hybridspec.engine.engine import Engine
from hybridspec.engine.request import Request
from hybridspec.models import ModelConfig
from hybridspec.models.hybrid import memory_specs
from hybridspec.runtime import MemoryOptions
from measured_commit import measured_commit


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=[*GEOMETRIES, "bundled"], default="9b")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.85, 0.7, 0.55])
    parser.add_argument("--decoding", type=int, default=32, help="requests beside the long prompt")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sharing", type=int, default=64, help="requests that share a prompt")
    parser.add_argument("--shared", type=int, default=8192, help="tokens that they share")
    parser.add_argument("--capture-prompts", action=argparse.BooleanOptionalAction)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def some_tokens(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(1, vocab) for _ in range(count)]


def submit(engine: Engine, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = engine.make_request(prompt, params)
    engine.submit(request)
    return request


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def first_tokens(engine: Engine, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Run prompts that come together; when the last one has its first token."""
    before, started = engine.counters(), time.perf_counter()
    requests = [submit(engine, prompt, max_tokens) for prompt in prompts]
    while any(request.num_generated == 0 for request in requests):
        engine.step()
    seconds = time.perf_counter() - started
    finish(engine)
    after = engine.counters()
    return {
        "last_first_token_ms": seconds * 1e3,
        "prompt_rows": after.prompt_rows - before.prompt_rows,
        "reused_tokens": after.prefix_hits - before.prefix_hits,
        "tokens": [request.token_ids for request in requests],
    }


def gaps_beside(
    engine: Engine, prompts: list[list[int]], long: list[int] | None
) -> tuple[list[float], list[list[int]], float]:
    """Times between outputs of requests that decode: all the time, or while a prompt runs."""
    requests = [submit(engine, prompt, 400) for prompt in prompts]
    while any(request.num_generated < 8 for request in requests):
        engine.step()
    other = None if long is None else submit(engine, long, 1)
    started = time.perf_counter()
    last, counts = [started] * len(requests), [request.num_generated for request in requests]
    gaps: list[float] = []
    for step in range(80):
        if other is not None and other.finish_reason is not None:
            break
        if other is None and step == 40:
            break
        engine.step()
        now = time.perf_counter()
        for i, request in enumerate(requests):
            if request.num_generated > counts[i]:
                gaps.append(now - last[i])
                last[i], counts[i] = now, request.num_generated
    elapsed = time.perf_counter() - started
    tokens = [request.token_ids[:8] for request in requests]
    for request in requests:
        engine.abort(request)
    finish(engine)
    return gaps, tokens, elapsed


def beside_a_prompt(args: argparse.Namespace, engine: Engine, vocab: int) -> dict[str, Any]:
    """The share by which a prompt slows others down."""
    rng = random.Random(1)
    prompts = [some_tokens(rng, 24, vocab) for _ in range(args.decoding)]
    plain, beside, longest = [], [], []
    gaps_beside(engine, prompts, some_tokens(rng, args.long, vocab))  # warms up
    for _ in range(args.rounds):
        plain += gaps_beside(engine, prompts, None)[0]
        gaps, _, elapsed = gaps_beside(engine, prompts, some_tokens(rng, args.long, vocab))
        beside += gaps
        longest.append(elapsed * 1e3)
    median = statistics.median(plain)
    p99 = sorted(beside)[min(int(0.99 * len(beside)), len(beside) - 1)]
    return {
        "plain_median_ms": median * 1e3,
        "beside_median_ms": statistics.median(beside) * 1e3,
        "beside_p99_ms": p99 * 1e3,
        "p99_over_plain_median": p99 / median,
        "long_first_token_ms": statistics.median(longest),
        "gaps": len(beside),
    }


def sharing(args: argparse.Namespace, engine: Engine, vocab: int) -> dict[str, Any]:
    """Requests that share a prompt against as many that share nothing, of the same lengths."""
    rng = random.Random(2)
    common = some_tokens(rng, args.shared, vocab)
    ends = [some_tokens(rng, 16, vocab) for _ in range(args.sharing)]
    # The same requests, one after the other, say what is right; each begins with nothing kept.
    few = min(args.sharing, 3)
    right = []
    for end in ends[:few]:
        while engine.allocator.give_up():
            pass
        right += first_tokens(engine, [common + end], 8)["tokens"]
    while engine.allocator.give_up():
        pass
    found = first_tokens(engine, [common + end for end in ends], 8)
    near_ties = sum(a != b for a, b in zip(right, found.pop("tokens")[:few], strict=True))
    apart = first_tokens(engine, [some_tokens(rng, args.shared, vocab) + end for end in ends], 1)
    del apart["tokens"]
    speedup = apart["last_first_token_ms"] / found["last_first_token_ms"]
    return {"shared": found, "apart": apart, "times_sooner": speedup, "other_tokens": near_ties}


def memory(args: argparse.Namespace, folder: Any) -> dict[str, Any] | None:
    """Bytes of a request in the published dtypes, whatever the device of this run."""
    if args.geometry == "bundled":
        return None
    config = ModelConfig.from_folder(folder)
    options = MemoryOptions(dtype=torch.bfloat16, state_dtype=torch.float32)
    specs = memory_specs(config, options, has_head=True)
    parts, state = specs.bytes_by_part(), specs.state_bytes()
    return {
        "parts": parts,
        "bytes_per_token": specs.token_bytes(),
        "over_one_checkpoint": specs.request_bytes() / state,
        "snapshots_over_one_checkpoint": {k: 1.0 + k for k in (1, 3, 7)},
    }


def prompts_alone(engine: Engine, vocab: int, shapes: list[tuple[int, int]]) -> dict[str, float]:
    """Milliseconds to the last first token of prompts that nobody has computed, by their sizes."""
    rng, found = random.Random(3), {}
    for count, length in shapes:
        times = [
            first_tokens(engine, [some_tokens(rng, length, vocab) for _ in range(count)], 1)
            for _ in range(4)
        ]
        found[f"{count} x {length}"] = statistics.median(
            one["last_first_token_ms"] for one in times[1:]
        )
    return found


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as name:
        model: Any = "bundled"
        vocab = 250
        if args.geometry != "bundled":
            model, vocab = write_geometry(Path(name), args.geometry, args.vocab), args.vocab
        report: dict[str, Any] = {"benchmark": "prompts_under_load", "memory": memory(args, model)}
        print(json.dumps(report["memory"]), flush=True)
        engine = LLM(
            model,
            draft_tokens=args.drafts,
            device=args.device,
            dummy_weights=args.geometry != "bundled",
            acceptance=args.acceptance if args.drafts else None,
            max_model_len=max(args.long, args.shared) + 512,
            max_num_seqs=max(args.decoding + 1, args.sharing),
            enable_prefix_caching=True,
            capture_prompts=args.capture_prompts,
        )._engine
        shapes = [(1, args.long), (args.decoding, 128)]
        for key, measured in (
            ("beside", lambda: beside_a_prompt(args, engine, vocab)),
            ("alone_ms", lambda: prompts_alone(engine, vocab, shapes)),
            ("alike", lambda: sharing(args, engine, vocab)),
        ):
            report[key] = measured()
            print(key, json.dumps(report[key]), flush=True)
        if engine.resolved.device.type == "cuda":
            rate, alone = product_rate(engine.model), report["alone_ms"][f"1 x {args.long}"]
            report |= {
                "product_rate": rate,
                "share_of_products": prompt_share(engine.model, args.long, alone, rate),
            }
    report |= {
        **{k: v for k, v in vars(args).items() if k != "json"},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "commit": measured_commit(),
    }
    if args.json:
        args.json.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
