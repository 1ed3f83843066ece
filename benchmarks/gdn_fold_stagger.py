"""Time every GDN verify step of 256 requests that were admitted together, with and without stagger.

All cursors start at zero. Each step decides its folds, verifies four rows a request through the
public operator and commits; the verify call alone is timed, as a graph. A step's time is its median
over the rounds, in which the variants take turns; the figures are percentiles over the steps. Both
variants commit the same rows, so their last outputs must agree up to the rounding of the states.

    python benchmarks/gdn_fold_stagger.py --json benchmarks/results/gdn_fold_stagger_h200.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fold_rules import PATTERNS, REQUESTS, RING, WINDOW
from harness import (
    Variant,
    read_pool,
    time_interleaved,
    write_rows,
)
from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops
from hybridspec.ops.ring import RingView

DEVICE = "cuda"
HEADS, VALUE_HEADS, HEAD_DIM, ROWS, NUM_VALUES = 16, 64, 128, 4, 8
MEASURED = ("T = 4, all accepted", "T = 4, 0.9 per draft", "T = 4, 1 to 4 committed")
# States are bf16, rounded at every fold, and the variants fold at different times.
TOLERANCE = 2e-2


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """Warm a call up, capture it and return its replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class Layer:
    """One layer's pools, the rows of a step, and the calls of a step."""

    def __init__(self) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            drawn = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
            return drawn.normal_(generator=generator)

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=DEVICE)

        num_rows, head, value_head = REQUESTS * ROWS, (HEADS, HEAD_DIM), (VALUE_HEADS, HEAD_DIM)
        self.rows = [normal(num_rows, *shape) for shape in (head, head, value_head)]
        self.rows += [normal(num_rows, VALUE_HEADS) for _ in range(2)]
        self.params = [normal(VALUE_HEADS).float() * 0.3 for _ in range(2)]
        self.values = [normal(num_rows, *value_head) for _ in range(NUM_VALUES)]
        self.pristine = normal(REQUESTS, VALUE_HEADS, HEAD_DIM, HEAD_DIM)
        self.state = self.pristine.clone()
        self.slots = torch.arange(REQUESTS, dtype=torch.int32, device=DEVICE)
        self.cursors = [integers(REQUESTS) for _ in range(3)]
        self.ring = RingView(
            k=F.normalize(normal(REQUESTS, HEADS, RING, HEAD_DIM), dim=-1),
            u=normal(REQUESTS, VALUE_HEADS, RING, HEAD_DIM),
            cum_log_decay=torch.zeros(REQUESTS, VALUE_HEADS, RING, device=DEVICE),
            ring_start=self.cursors[1],
            history_len=self.cursors[2],
            max_window=WINDOW,
        )
        self.cu_seqlens = torch.arange(REQUESTS + 1, dtype=torch.int32, device=DEVICE) * ROWS
        self.num_rows, self.num_committed = integers(REQUESTS), integers(REQUESTS)
        self.is_fold = integers(REQUESTS, dtype=torch.int8)
        self.out = torch.empty_like(self.rows[2])

    def restart(self) -> None:
        """Admit all requests anew."""
        self.state.copy_(self.pristine)
        for cursor in self.cursors:
            cursor.zero_()

    def decide(self, *, is_staggered: bool) -> None:
        self.num_rows.fill_(ROWS)
        ring_ops.decide_folds(
            self.ring.history_len, self.slots, self.num_rows, self.is_fold, max_window=WINDOW,
            ring_start=self.ring.ring_start if is_staggered else None,
        )  # fmt: skip

    def verify(self) -> None:
        gated_delta_rule.verify(
            *self.rows, *self.params, self.state, self.ring, self.cu_seqlens, self.slots,
            max_verify_tokens=ROWS, is_fold=self.is_fold, out=self.out,
        )  # fmt: skip

    def commit(self) -> None:
        ring_ops.commit(
            *self.cursors, self.slots, self.is_fold, self.num_rows, self.num_committed,
            ring_capacity=RING,
        )  # fmt: skip


class Run:
    """One variant: its captured calls, and what its steps took."""

    def __init__(self, layer: Layer, *, is_staggered: bool) -> None:
        self.layer = layer
        self.decide = captured(lambda: layer.decide(is_staggered=is_staggered))
        self.verify = captured(layer.verify)
        self.commit = captured(layer.commit)
        self.times: list[list[float]] = []
        self.shares = torch.empty(0)

    def round(self, committed: Tensor) -> Tensor:
        """Decode from admission on, `committed` [steps, B] rows a step; return the last output."""
        layer = self.layer
        layer.restart()
        marks = torch.empty(committed.shape, dtype=torch.int8, device=DEVICE)
        events = []
        for step, counts in enumerate(committed):
            layer.num_committed.copy_(counts)
            layer.rows[2].copy_(layer.values[step % NUM_VALUES])
            self.decide()
            marks[step].copy_(layer.is_fold)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.verify()
            end.record()
            self.commit()
            events.append((begin, end))
        torch.cuda.synchronize()
        self.times.append([1e3 * begin.elapsed_time(end) for begin, end in events])
        self.shares = marks.float().mean(1)
        return layer.out.clone()

    def figures(self) -> dict[str, float]:
        found = {}
        for name, values, digits in (
            ("us", torch.tensor(self.times).median(0).values, 1),
            ("fold_share", self.shares, 3),
        ):
            for key, value in (
                ("mean", values.mean()),
                ("p50", values.quantile(0.5)),
                ("p99", values.quantile(0.99)),
                ("max", values.max()),
            ):
                found[f"{name}_{key}"] = round(float(value), digits)
        return found


def measure(layer: Layer, pattern: str, steps: int, rounds: int) -> list[dict]:
    """Run both variants on one pattern of acceptance."""
    generator = torch.Generator().manual_seed(0)
    committed = torch.stack([PATTERNS[pattern](generator)[1] for _ in range(steps)]).to(DEVICE)
    runs = {name: Run(layer, is_staggered=name == "staggered") for name in ("full", "staggered")}
    for _ in range(rounds):
        full, staggered = (run.round(committed).float() for run in runs.values())
    error = float((full - staggered).norm() / full.norm())
    if not error <= TOLERANCE:
        raise AssertionError(f"{pattern}: outputs differ by {error:.2e}")
    return [
        {"pattern": pattern, "folds": name, **run.figures(), "difference": round(error, 5)}
        for name, run in runs.items()
    ]


def read_and_decide(layer: Layer) -> dict[str, float]:
    """Microseconds of reading all states, and of deciding with and without stagger."""
    sink = torch.empty(1, device=DEVICE)
    variants = [
        Variant("state_read_us", lambda: read_pool(layer.state, layer.state.numel(), sink)),
        Variant("decide_us", lambda: layer.decide(is_staggered=False)),
        Variant("decide_staggered_us", lambda: layer.decide(is_staggered=True)),
    ]
    timings = time_interleaved(variants, 40)
    return {name: round(timing.median, 2) for name, timing in timings.items()}


def main() -> None:
    """Measure all patterns; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of a round (default 200)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--json", type=Path, help="where to write all rows")
    options = parser.parse_args()
    layer, rows = Layer(), []
    for pattern in MEASURED:
        for row in measure(layer, pattern, options.steps, options.rounds):
            rows.append(row)
            print(
                f"{pattern:26} {row['folds']:9} us: mean {row['us_mean']:6.1f}  p50 "
                f"{row['us_p50']:6.1f}  p99 {row['us_p99']:6.1f}  max {row['us_max']:6.1f}   "
                f"folding: mean {row['fold_share_mean']:.3f}  p99 {row['fold_share_p99']:.3f}"
            )
    write_rows(
        rows, options.json, requests=REQUESTS, steps=options.steps, rounds=options.rounds,
        **read_and_decide(layer),
    )  # fmt: skip


if __name__ == "__main__":
    main()
