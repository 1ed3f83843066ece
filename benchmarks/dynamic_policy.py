"""The policy that sizes steps against fixed numbers of drafts: simulated, on measured costs.

Steps cost what a table says, measured at start by the engine on the device that it names. Requests
come by a trace, their drafts stand with a probability of their own that may drift, and a drafter
tells how sure it is, or does not. Decoding only: prompts take no time, and are the same for all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops.verify_plan import select_rows
from hybridspec.speculate.costs import CostTable
from hybridspec.speculate.policy import DynamicPolicy, FixedPolicy, Policy, StepPlan, StepSeen
from measured_commit import measured_commit

NUM_DRAFTS = 3
SHAPE = (1.0, 0.82, 0.65)  # acceptance of later drafts beside the first one's
NUM_TOKENS = 160  # of a request
MOST_RUNNING = 256
FOLD_S = 1.6e-6  # what a committed token adds to a step, which no policy is told
RESULTS = Path(__file__).resolve().parent / "results"


def load_costs(file: Path) -> CostTable:
    """Read a table of costs."""
    table = json.loads(file.read_text())["costs"]
    return CostTable(
        verify={
            int(size): {int(rows): s for rows, s in line.items()}
            for size, line in table["verify"].items()
        },
        draft={int(size): line for size, line in table["draft"].items()},
    )


@dataclass(frozen=True)
class Load:
    """Work for so many requests at a time, one coming where one ends.

    Attributes:
        seconds: that plain decoding takes for it.
        running: requests at a time.
        first, last: acceptance of a first draft when it begins and when it ends.
    """

    seconds: float
    running: int
    first: float
    last: float

    def tokens(self, costs: CostTable) -> float:
        rows = costs.budgets(self.running)[0]
        return self.seconds * self.running / costs.seconds(self.running, rows, 0)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What comes and how its drafts fare.

    Attributes:
        name: for the table.
        arrivals: seconds at which requests come.
        level: acceptance of a first draft at a time, where there are arrivals.
        loads: in place of arrivals, one behind the other.
        differ: half the width within which requests differ.
        spread: half the width within which the drafts of a request differ, and their confidences.
        is_telling: whether confidences are the drafts' own acceptance; else they are 0.6.
    """

    name: str
    arrivals: tuple[float, ...] = ()
    level: Callable[[float], float] = lambda now: 0.0
    loads: tuple[Load, ...] = ()
    differ: float = 0.0
    spread: float = 0.0
    is_telling: bool = True


@dataclass(kw_only=True)
class Batch:
    """Running requests: their own acceptance, drafts and tokens to go."""

    own: Tensor = field(default_factory=lambda: torch.empty(0))
    rates: Tensor = field(default_factory=lambda: torch.empty(0, NUM_DRAFTS))
    left: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    since: Tensor = field(default_factory=lambda: torch.empty(0))

    def join(self, since: list[float], differ: float, draws: torch.Generator) -> None:
        count = len(since)
        own = differ * (2 * torch.rand(count, generator=draws) - 1)
        self.own = torch.cat([self.own, own])
        self.rates = torch.cat([self.rates, torch.zeros(count, NUM_DRAFTS)])
        self.left = torch.cat([self.left, torch.full((count,), NUM_TOKENS)])
        self.since = torch.cat([self.since, torch.tensor(since)])

    def leave(self) -> Tensor:
        """Let go who has no tokens to go; when these came."""
        keep = self.left > 0
        gone = self.since[~keep]
        self.own, self.rates, self.left = self.own[keep], self.rates[keep], self.left[keep]
        self.since = self.since[keep]
        return gone


@dataclass(kw_only=True)
class Run:
    """What a trace brought: tokens and busy seconds, and a series for the plot."""

    tokens: int = 0
    busy: float = 0.0
    waited: float = 0.0
    ended: int = 0
    series: list[tuple[float, int, int, int, float]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second in which anything ran."""
        return self.tokens / self.busy

    @property
    def seen_rate(self) -> float:
        """Tokens per second of a request, from its arrival to its end."""
        return NUM_TOKENS * self.ended / self.waited


def simulate(trace: Trace, policy: Policy, costs: CostTable, seed: int = 0) -> Run:
    """Run a trace; the policy learns of a step when the next one has been launched."""
    draws = torch.Generator().manual_seed(seed)
    batch, run, now = Batch(), Run(), 0.0
    coming: deque[float] = deque(trace.arrivals)
    unread: deque[tuple[Any, ...]] = deque()
    shape, loads = torch.tensor(SHAPE), Loads(trace.loads, costs)
    while True:
        if trace.loads:
            if not loads.left:
                return run
            level, count = loads.level, max(loads.left[0][0].running - len(batch.left), 0)
        else:
            if not len(batch.left):
                if not coming:
                    return run
                now = max(now, coming[0])
            waiting = sum(1 for _ in _until(coming, now))
            count, level = min(waiting, MOST_RUNNING - len(batch.left)), trace.level(now)
        came = [now if trace.loads else coming.popleft() for _ in range(count)]
        batch.join(came, trace.differ, draws)
        size = len(batch.left)
        plan = policy.choose(size)
        sure = batch.rates if trace.is_telling else torch.where(batch.rates > 0, 0.6, 0.0)
        cu_seqlens = select_rows(
            sure,
            torch.arange(size, dtype=torch.int32),
            num_rows=plan.rows,
            num_drafts=torch.full((size,), plan.depth, dtype=torch.int32),
            calibration=policy.table if isinstance(policy, DynamicPolicy) else None,
        )
        verified = cu_seqlens.diff() - 1
        stands = torch.rand(size, NUM_DRAFTS, generator=draws) < batch.rates
        stands &= torch.arange(NUM_DRAFTS) < verified[:, None]
        accepted = stands.int().cumprod(1).sum(1)
        committed = torch.minimum(accepted + 1, batch.left)
        batch.left = batch.left - committed
        seconds = _seconds(costs, plan) + FOLD_S * int(committed.sum())
        now += seconds
        run.tokens += int(committed.sum())
        run.busy += seconds
        loads.add(size, int(committed.sum()))
        run.series.append((now, size, plan.rows, plan.drafts, int(committed.sum()) / seconds))
        seen = StepSeen(
            committed=int(committed.sum()),
            seconds=seconds,
            outcomes=torch.stack([committed, accepted, verified + 1], 1).int(),
            confidences=sure,
        )
        unread.append((plan, seen))
        if len(unread) > 1:
            policy.note(*unread.popleft())
        own = (level + batch.own)[:, None] * shape
        draw = trace.spread * (2 * torch.rand(size, NUM_DRAFTS, generator=draws) - 1)
        proposed = torch.arange(NUM_DRAFTS) < plan.drafts
        batch.rates = torch.where(proposed, (own + draw).clamp(1e-3, 1), 0.0)
        gone = batch.leave()
        run.ended += len(gone)
        run.waited += float((now - gone).sum())


def _seconds(costs: CostTable, plan: StepPlan) -> float:
    """Return what the smallest captured step that holds a plan takes."""
    budgets = costs.budgets(plan.num_requests)
    rows = next((one for one in budgets if one >= plan.rows), budgets[-1])
    return costs.seconds(plan.num_requests, rows, plan.drafts)


class Loads:
    """Which load is on, and how much of it is done; what still runs of the one before is extra."""

    def __init__(self, loads: tuple[Load, ...], costs: CostTable) -> None:
        self.left = deque((load, load.tokens(costs)) for load in loads)
        self.done = 0

    @property
    def level(self) -> float:
        load, total = self.left[0]
        return load.first + self.done / total * (load.last - load.first)

    def add(self, size: int, tokens: int) -> None:
        """Count a step of so many requests."""
        if self.left and size <= self.left[0][0].running:
            self.done += tokens
            if self.done >= self.left[0][1]:
                self.left.popleft()
                self.done = 0


def _until(coming: deque[float], now: float) -> Iterator[float]:
    for at in coming:
        if at > now:
            return
        yield at


def poisson(rng: random.Random, phases: list[tuple[float, float]]) -> tuple[float, ...]:
    """Arrivals of phases, (seconds, requests a second) each."""
    times, begin = [], 0.0
    for length, rate in phases:
        at = begin + rng.expovariate(rate)
        while at < begin + length:
            times.append(at)
            at += rng.expovariate(rate)
        begin += length
    return tuple(times)


def traces(scale: float) -> list[Trace]:
    """Mixed loads, arrivals, then steady loads; `scale` is how long they last."""
    found = []
    rng = random.Random(1)
    drift = lambda now: 0.55 + 0.35 * math.sin(now / (6 * scale))  # noqa: E731
    loads = (
        Load(4 * scale, 4, 0.95, 0.8), Load(3 * scale, 256, 0.5, 0.3),
        Load(4 * scale, 16, 0.8, 0.9), Load(3 * scale, 192, 0.75, 0.6),
        Load(4 * scale, 1, 0.9, 0.9), Load(3 * scale, 256, 0.1, 0.3),
        Load(4 * scale, 32, 0.7, 0.9), Load(4 * scale, 2, 0.6, 0.4),
    )  # fmt: skip
    for is_telling in (True, False):
        tells = "tell" if is_telling else "say nothing"
        found.append(
            Trace(
                name=f"mixed load, confidences {tells}",
                loads=loads,
                differ=0.1,
                spread=0.25,
                is_telling=is_telling,
            )
        )
    kinds = {
        "mixed arrivals": [(15, 4.0), (8, 150.0), (10, 12.0), (6, 220.0)] * 2,
        "bursty arrivals": [(2, 400.0), (8, 4.0)] * 4,
        "few arrivals": [(40, 6.0)],
        "many arrivals": [(20, 150.0)],
    }
    for name, phases in kinds.items():
        for is_telling in (True, False):
            found.append(
                Trace(
                    name=f"{name}, confidences {'tell' if is_telling else 'say nothing'}",
                    arrivals=poisson(rng, [(scale * length, rate) for length, rate in phases]),
                    level=drift,
                    differ=0.1,
                    spread=0.25,
                    is_telling=is_telling,
                )
            )
    for running, level, spread in itertools.product((1, 32, 256), (0.85, 0.5, 0.2), (0.0, 0.3)):
        found.append(
            Trace(
                name=f"steady, {running} requests, acceptance {level} +- {spread}",
                loads=(Load(6 * scale, running, level, level),),
                spread=spread,
            )
        )
    return found


def compared(trace: Trace, file: Path) -> tuple[dict[str, Any], Run]:
    """Run a trace under every policy; rates of the device, or where there are arrivals, as seen."""

    def rate_of(run: Run) -> float:
        return run.rate if trace.loads else run.seen_rate

    fixed = {
        str(k): rate_of(simulate(trace, FixedPolicy(k), load_costs(file)))
        for k in range(NUM_DRAFTS + 1)
    }
    policy = DynamicPolicy(NUM_DRAFTS, load_costs(file))
    run = simulate(trace, policy, load_costs(file))
    seen = policy.report
    row = {
        "trace": trace.name,
        "fixed": fixed,
        "dynamic": rate_of(run),
        "ratio": rate_of(run) / max(fixed.values()),
        "probes": seen.probes / seen.steps,
        "expected_tokens": seen.expected_tokens / seen.committed,
        "expected_s": seen.expected_s / seen.seconds,
    }
    return row, run


def draw(rows: list[dict[str, Any]], run: Run, name: str, file: Path) -> None:
    """Draw what the policy chose in one trace, and the ratios of all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (load, chosen, ratios) = pyplot.subplots(3, 1, figsize=(9, 9))
    times, running, verified, drafts, _ = zip(*run.series, strict=True)
    load.plot(times, running, linewidth=0.8)
    load.set(title=f"{name}: requests that run", xlabel="s")
    shares = [rows / count for rows, count in zip(verified, running, strict=True)]
    chosen.plot(times, shares, linewidth=0.6, label="rows for each request")
    chosen.plot(times, drafts, linewidth=0.6, label="drafts proposed")
    chosen.set(xlabel="s")
    chosen.legend(loc="upper right")
    names = [row["trace"] for row in rows]
    ratios.barh(names, [row["ratio"] for row in rows])
    ratios.axvline(1.0, color="black", linewidth=0.8)
    ratios.tick_params(labelsize=5)
    ratios.set(xlim=(0.9, None), title="tokens per second over the best fixed number")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--costs", type=Path, default=RESULTS / "dynamic_policy_engine_h200.json")
    parser.add_argument("--scale", type=float, default=1.0, help="length of the traces")
    parser.add_argument("--only", default="", help="only traces whose names begin like this")
    parser.add_argument("--limit", type=int, help="only the first of them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="where to draw; needs matplotlib")
    args = parser.parse_args()
    rows, first = [], None
    chosen = [one for one in traces(args.scale) if one.name.startswith(args.only)]
    for trace in chosen[: args.limit]:
        row, run = compared(trace, args.costs)
        rows.append(row)
        first = first or (trace.name, run)
        rates = " ".join(f"{rate:7.1f}" for rate in row["fixed"].values())
        print(
            f"{trace.name:48} fixed {rates}  dynamic {row['dynamic']:7.1f}  "
            f"x {row['ratio']:.3f}  probes {row['probes']:.1%}",
            flush=True,
        )
    assert first is not None
    if args.plot:
        draw(rows, first[1], first[0], args.plot)
    text = json.dumps(
        {
            "benchmark": "dynamic_policy",
            "costs": args.costs.name,
            "scale": args.scale,
            "commit": measured_commit(),
            "rows": rows,
        }
    )
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
