"""The engine with a policy that sizes its steps, against fixed numbers of drafts, in one process.

One engine of a published geometry with made-up weights and forced acceptance runs everything; only
its policy changes between runs, in turn. What a full batch decodes per second is compared for each
spread of the drafts' acceptance, then the time that a mixed load takes: phases of few and of many
requests whose drafts fare differently, prompts included. Without drafts the head's log is still
kept, so plain decoding is a little faster than it looks here. The tokens are synthetic; first, the
bundled model has to say the same under every policy.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from geometries import GEOMETRIES, write_geometry
from hybridspec import LLM, SamplingParams
from hybridspec.bundled import held_out_prompts
from hybridspec.engine.request import Request
from hybridspec.speculate import CostTable, DynamicPolicy, FixedPolicy, Policy
from measured_commit import measured_commit

SKIPPED = 4  # steps behind the last first token
COUNTED = 0.9  # of the tokens: then the first requests end


@dataclass(frozen=True)
class Phase:
    """Requests that come together."""

    requests: int
    tokens: int
    rates: tuple[float, ...]
    spread: float


MIXED = (
    Phase(4, 256, (0.9, 0.85, 0.8), 0.1),
    Phase(256, 96, (0.45, 0.35, 0.25), 0.4),
    Phase(16, 256, (0.85, 0.7, 0.55), 0.3),
    Phase(192, 96, (0.7, 0.55, 0.4), 0.5),
    Phase(1, 256, (0.9, 0.85, 0.8), 0.1),
    Phase(256, 96, (0.2, 0.15, 0.1), 0.2),
    Phase(32, 192, (0.85, 0.7, 0.55), 0.5),
    Phase(2, 256, (0.5, 0.4, 0.3), 0.3),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=[*GEOMETRIES, "bundled"], default="9b")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=256, help="of the full batch")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--fixed", type=int, nargs="+", help="fixed numbers (default: all)")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.85, 0.7, 0.55])
    parser.add_argument("--spreads", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--prompt", type=int, default=16, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of the full batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mixed-rounds", type=int, default=1, help="0 leaves the mixed load out")
    parser.add_argument("--warm", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--mixed-tokens", type=int, default=256, help="most of a request there")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def check(device: str, drafts: int) -> None:
    """Raise unless the bundled model says the same under every policy."""
    prompts = [prompt.text[-64:] for prompt in held_out_prompts("code")[:4]]
    params = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=64, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    told = []
    for speculation in ("off", "dynamic"):
        llm = LLM(
            "bundled",
            device=device,
            dtype="float32",
            speculation=speculation,
            draft_tokens=drafts,
            max_num_seqs=2,
            max_model_len=256,
            memory_fraction=0.5,
        )
        told.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
    if told[0] != told[1]:
        raise AssertionError("tokens differ between policies")


def prompts_of(rng: random.Random, count: int, length: int, vocab: int) -> list[list[int]]:
    return [[rng.randrange(1, vocab) for _ in range(length)] for _ in range(count)]


def submitted(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=1)
    requests = [llm._engine.make_request(prompt, params) for prompt in prompts]
    for request in requests:
        llm._engine.submit(request)
    return requests


def full_batch(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> dict[str, float]:
    """Decode one batch; tokens per second while all of its requests run."""
    engine = llm._engine
    requests = submitted(llm, prompts, tokens)
    marks: list[tuple[float, int]] = []
    while engine.has_work:
        engine.step()
        counts = [request.num_generated for request in requests]
        if min(counts) > 0 and max(counts) < COUNTED * tokens:
            marks.append((time.perf_counter(), sum(counts)))
    first, last = marks[min(SKIPPED, len(marks) - 2)], marks[-1]
    steps = len(marks) - 1 - min(SKIPPED, len(marks) - 2)
    seconds, count = last[0] - first[0], last[1] - first[1]
    return {
        "tokens_per_s": count / seconds,
        "step_ms": 1e3 * seconds / steps,
        "tokens_per_step": count / steps / len(prompts),
    }


def mixed_load(llm: LLM, phases: Sequence[Phase], length: int, vocab: int) -> float:
    """Run the phases one behind the other; tokens per second of all of it."""
    rng, engine = random.Random(2), llm._engine
    forced = engine.runner.decoder.forced
    total, started = 0, time.perf_counter()
    for phase in phases:
        if forced is not None:
            forced.rates.copy_(torch.tensor(phase.rates)[: len(forced.rates)])
            forced.spread.fill_(phase.spread)
        requests = submitted(llm, prompts_of(rng, phase.requests, length, vocab), phase.tokens)
        while engine.has_work:
            engine.step()
        total += sum(request.num_generated for request in requests)
    return total / (time.perf_counter() - started)


def compared(found: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the dynamic policy over the best fixed number of drafts, round by round."""
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    others = [name for name in found if name != "dynamic"]
    best = max(others, key=medians.__getitem__)
    ratios = [a / b for a, b in zip(found["dynamic"], found[best], strict=True)]
    return {
        "tokens_per_s": medians,
        "best_fixed": best,
        "ratio": statistics.median(ratios),
        "rounds": found,
    }


def costs_of(policy: Policy) -> dict[str, Any] | None:
    costs = policy.costs if isinstance(policy, DynamicPolicy) else None
    if not isinstance(costs, CostTable):
        return None
    return {"verify": costs.verify, "draft": costs.draft, "per_request": costs.per_request}


class Bench:
    """One engine whose policy is changed, and what was found with it.

    Args:
        args: flags.
        model: folder or "bundled".
        vocab: words of its prompts.
    """

    def __init__(self, args: argparse.Namespace, model: Any, vocab: int) -> None:
        self.args, self.vocab = args, vocab
        started = time.perf_counter()
        self.llm = LLM(
            model,
            device=args.device,
            dummy_weights=model != "bundled",
            max_model_len=1024,
            max_num_seqs=args.requests,
            draft_tokens=args.drafts,
            speculation="dynamic",
            acceptance=args.acceptance,
        )
        runner = self.llm._engine.runner
        self.policies: dict[str, Policy] = {
            str(k): FixedPolicy(k) for k in args.fixed or range(args.drafts + 1)
        } | {"dynamic": runner.policy}
        self.report: dict[str, Any] = {
            "benchmark": "dynamic_policy_engine",
            **{k: v for k, v in vars(args).items() if k != "json"},
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            "commit": measured_commit(),
            "start_s": round(time.perf_counter() - started, 1),
            "graph_mib": 0 if runner.graphs is None else runner.graphs.nbytes >> 20,
            "costs": costs_of(runner.policy),
            "full_batch": [],
        }
        print(f"start {self.report['start_s']} s, graphs {self.report['graph_mib']} MiB")

    def in_turn(self, rounds: int, run: Callable[[], float], warm: int = 0) -> dict[str, Any]:
        """Run under every policy in turn, `warm` rounds that do not count first; compare rates."""
        found: dict[str, list[float]] = {name: [] for name in self.policies}
        for index in range(rounds + warm):
            for name, policy in self.policies.items():
                self.llm._engine.runner.policy = policy
                rate = run()
                if index >= warm:
                    found[name].append(rate)
        return compared(found) | {"seen": policy_report(self.policies["dynamic"])}

    def full_batches(self) -> None:
        """Compare what a full batch decodes per second, for each spread."""
        args, forced = self.args, self.llm._engine.runner.decoder.forced
        assert forced is not None
        prompts = prompts_of(random.Random(0), args.requests, args.prompt, self.vocab)
        for spread in args.spreads:
            forced.rates.copy_(torch.tensor(args.acceptance))
            forced.spread.fill_(spread)
            steps: list[dict[str, float]] = []

            def run(steps: list[dict[str, float]] = steps) -> float:
                steps.append(full_batch(self.llm, prompts, args.tokens))
                return steps[-1]["tokens_per_s"]

            row = self.in_turn(args.rounds, run, warm=args.warm)
            last = dict(zip(self.policies, steps[-len(self.policies) :], strict=True))
            self.report["full_batch"].append({"spread": spread, **row, "last": last})
            shown = {
                k: f"{v['step_ms']:.2f} ms {v['tokens_per_step']:.2f}" for k, v in last.items()
            }
            print(f"spread {spread}: {row} {shown}", flush=True)
            self.write()

    def mixed_loads(self) -> None:
        """Compare the time of the mixed load."""
        phases = scaled(self.args)
        self.report["mixed"] = self.in_turn(
            self.args.mixed_rounds,
            lambda: mixed_load(self.llm, phases, self.args.prompt, self.vocab),
        )
        print(f"mixed: {self.report['mixed']}", flush=True)
        self.write()

    def write(self) -> str:
        """Write what was found so far."""
        text = json.dumps(self.report)
        if self.args.json:
            self.args.json.write_text(text + "\n")
        return text


@torch.inference_mode()
def main() -> int:
    args = arguments()
    check(args.device, args.drafts)
    with tempfile.TemporaryDirectory() as name:
        if args.geometry == "bundled":
            bench = Bench(args, "bundled", 250)
        else:
            folder = write_geometry(Path(name), args.geometry, args.vocab)
            bench = Bench(args, folder, args.vocab)
        bench.write()
        bench.full_batches()
        if args.mixed_rounds:
            bench.mixed_loads()
    print(bench.write())
    return 0


def scaled(args: argparse.Namespace) -> list[Phase]:
    """The phases, no larger than the full batch and no longer than asked."""
    most = args.mixed_tokens
    return [
        Phase(min(p.requests, args.requests), min(p.tokens, most), p.rates, p.spread) for p in MIXED
    ]


def policy_report(policy: Policy) -> dict[str, Any]:
    """What the policy expected, and what happened."""
    seen = policy.report
    return {
        "steps": seen.steps,
        "probes": seen.probes,
        "step_ms": round(1e3 * seen.seconds / max(seen.steps, 1), 3),
        "by_drafts": dict(sorted(seen.by_drafts.items())),
        "expected_tokens_over_committed": round(seen.expected_tokens / max(seen.committed, 1), 4),
        "expected_s_over_seconds": round(seen.expected_s / max(seen.seconds, 1e-9), 4),
        "acceptance": [None if one is None else round(one, 3) for one in seen.acceptance],
    }


if __name__ == "__main__":
    sys.exit(main())
