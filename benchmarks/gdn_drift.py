"""Thousands of decode steps with random acceptance: how far states drift, for each mode of dtypes.

Every mode verifies four rows a step and commits a random number of them; rows that were not
committed are fed again. The oracle decodes the committed rows in fp64, one after another; beside it
runs decoding that rounds the state to its dtype after every token. Printed is the relative error of
the states at the start, at step 500 and at the end, and its mean over the run.

    python benchmarks/gdn_drift.py --json benchmarks/results/gdn_drift_h200.json

`--memory short` has heads that forget within a token or a few, where a state is hardly more than
its window: there the rounding of what the ring holds shows, elsewhere that of the state.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from gdn_verify import MODES
from harness import environment
from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops
from hybridspec.ops.ring import RawRingView, RingView
from measured_commit import measured_commit

REQUESTS, HEADS, VALUE_HEADS, DIM, SIZE = 16, 2, 8, 128, 4
EVERY = 50
MEMORIES = {"long": (-9.0, -2.0), "short": (-1.0, 1.0)}  # A_log of the first and the last head
# Over a ring of raw rows; windows have room for the rows of a step within 16.
RAW_MODES = {f"raw_{name}": MODES[name] for name in ("bf16", "fp16_io", "fp32_state")}
# See gdn_8bit_forms.py for states of 8 bits.
DRIFTING = {name: dtypes for name, dtypes in MODES.items() if name != "int8_state"} | RAW_MODES


class TokenByToken:
    """Decodes committed rows one after another and rounds the state after each."""

    def __init__(self, compute: torch.dtype, state: torch.dtype, device: str) -> None:
        self.compute = compute
        shape = (REQUESTS, VALUE_HEADS, DIM, DIM)
        self.state = torch.zeros(shape, dtype=state, device=device)

    def advance(self, rows: list[torch.Tensor], A_log: torch.Tensor, count: torch.Tensor) -> None:
        """Run the first count[b] of the four rows of request b."""
        _, k, v, a, b = (part.to(self.compute) for part in rows)
        decay = (-A_log.to(self.compute).exp() * F.softplus(a)).exp()
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        k = k.repeat_interleave(VALUE_HEADS // HEADS, 2)
        for t in range(SIZE):
            wide, key = self.state * decay[:, t, :, None, None], k[:, t, :, None]
            u = b[:, t, :, None].sigmoid() * (v[:, t] - (wide * key).sum(-1))
            new = (wide + u[..., None] * key).to(self.state.dtype)
            is_kept = (t < count)[:, None, None, None]
            self.state.copy_(torch.where(is_kept, new, self.state))


class Mode:
    """Pools of one mode of dtypes; slot REQUESTS + b is scratch of request b."""

    def __init__(self, name: str, A_log: torch.Tensor) -> None:
        self.act, state, ring = DRIFTING[name]
        slots, device = 2 * REQUESTS, A_log.device
        self.A_log, self.dt_bias = A_log, torch.zeros_like(A_log)

        def pool(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((slots, *shape), torch.nan, dtype=dtype, device=device)

        def cursor(size: int = slots) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.state = pool(VALUE_HEADS, DIM, DIM, dtype=state).zero_()
        keys, values = (pool(n, 32, DIM, dtype=ring) for n in (HEADS, VALUE_HEADS))
        numbers = [pool(VALUE_HEADS, 32, dtype=torch.float32) for _ in range(2)]
        self.ring: RingView | RawRingView
        if name in RAW_MODES:
            self.ring = RawRingView(keys, values, *numbers, cursor(), cursor(), 16 - SIZE)
            self.verify = gated_delta_rule.verify_raw
        else:
            self.ring = RingView(keys, values, numbers[0], cursor(), cursor())
            self.verify = gated_delta_rule.verify
        self.seq_len, self.verified = cursor(), cursor(REQUESTS)
        self.slots = torch.arange(REQUESTS, dtype=torch.int32, device=device)
        self.bounds = SIZE * torch.arange(REQUESTS + 1, dtype=torch.int32, device=device)
        self.is_fold = torch.zeros(REQUESTS, dtype=torch.int8, device=device)
        self.num_folds = torch.zeros((), dtype=torch.int64, device=device)

    def step(self, rows: list[torch.Tensor], count: torch.Tensor) -> None:
        """Verify four rows of each request and commit count[b] of them."""
        ring = self.ring
        self.verified.fill_(SIZE)
        ring_ops.decide_folds(
            ring.history_len, self.slots, self.verified, self.is_fold, max_window=ring.max_window
        )
        self.num_folds += self.is_fold.sum()
        self.rows = [part.flatten(0, 1).to(self.act) for part in rows]
        self.verify(
            *self.rows, self.A_log, self.dt_bias, self.state, ring, self.bounds, self.slots,
            max_verify_tokens=SIZE, is_fold=self.is_fold,
        )  # fmt: skip
        ring_ops.commit(
            self.seq_len, ring.ring_start, ring.history_len, self.slots, self.is_fold,
            self.verified, count, ring_capacity=32,
        )  # fmt: skip

    def current(self) -> torch.Tensor:
        """Return the states with their windows, [B, HV, V, K]."""
        scratch, ring = self.slots + REQUESTS, self.ring
        if isinstance(ring, RingView):
            longest = torch.full_like(self.slots, 32)
            gated_delta_rule.materialize(self.state, ring, self.slots, scratch, longest)
            return self.state[REQUESTS:]
        ring_ops.copy_slots([self.state, *ring[:6]], self.slots, scratch)
        none = [part.new_empty((0, *part.shape[1:])) for part in self.rows]
        gated_delta_rule.verify_raw(
            *none, self.A_log, self.dt_bias, self.state, ring, 0 * self.bounds, scratch,
            max_verify_tokens=SIZE, is_fold=torch.ones_like(self.is_fold),
        )  # fmt: skip
        return self.state[REQUESTS:]


def captured(step: Callable[[], None], device: str) -> Callable[[], None]:
    """Return what runs a step: a graph of it on a GPU."""
    if device == "cpu":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def run(num_steps: int, names: list[str], memory: str, device: str) -> list[dict]:
    """Run all modes on the same rows and return one row of figures for each."""
    generator = torch.Generator(device).manual_seed(0)
    accepted = torch.randint(
        0, SIZE + 1, (num_steps, REQUESTS), generator=generator, device=device, dtype=torch.int32
    )
    length = int(accepted.sum(0).max()) + SIZE
    shapes = ((HEADS, DIM), (HEADS, DIM), (VALUE_HEADS, DIM), (VALUE_HEADS,), (VALUE_HEADS,))
    # Rounded once, so that all modes and the oracle see the same numbers.
    rows = [
        torch.randn(REQUESTS, length, *shape, generator=generator, device=device)
        .to(torch.bfloat16)
        .float()
        for shape in shapes
    ]
    A_log = torch.linspace(*MEMORIES[memory], VALUE_HEADS, device=device)
    exact = TokenByToken(torch.float64, torch.float64, device)
    states = {name: DRIFTING[name][1] for name in names}
    rounded = {dtype: TokenByToken(torch.float32, dtype, device) for dtype in set(states.values())}
    modes = {name: Mode(name, A_log) for name in names}
    position = torch.zeros(REQUESTS, dtype=torch.int64, device=device)
    count = accepted[0].clone()
    offsets = torch.arange(SIZE, device=device)
    requests = torch.arange(REQUESTS, device=device)[:, None]

    def step() -> None:
        index = position[:, None] + offsets
        fed = [part[requests, index] for part in rows]
        for decoder in (exact, *rounded.values()):
            decoder.advance(fed, A_log, count)
        for mode in modes.values():
            mode.step(fed, count)
        position.add_(count)

    count.zero_()  # nothing is committed while the graph is captured
    step()
    replay = captured(step, device)
    for mode in modes.values():
        mode.num_folds.zero_()
    errors: dict[str, list[float]] = {name: [] for name in names}
    baseline: dict[torch.dtype, list[float]] = {dtype: [] for dtype in rounded}
    for index in range(num_steps):
        count.copy_(accepted[index])
        replay()
        if index % EVERY == EVERY - 1:
            scale = exact.state.norm()
            for name, mode in modes.items():
                error = (mode.current().double() - exact.state).norm() / scale
                errors[name].append(error.item())
            for dtype, decoder in rounded.items():
                error = (decoder.state.double() - exact.state).norm() / scale
                baseline[dtype].append(error.item())
    result = []
    early = 500 // EVERY
    for name in names:
        ours, theirs = errors[name], baseline[states[name]]
        folds = int(modes[name].num_folds)
        assert folds > num_steps * REQUESTS / 10, "the run did not fold"
        result.append(
            {
                "mode": name,
                "memory": memory,
                "dtypes": [str(dtype).removeprefix("torch.") for dtype in DRIFTING[name]],
                "steps": num_steps,
                "requests": REQUESTS,
                "folds": folds,
                "at_50": ours[0],
                "at_500": ours[early - 1],
                "at_end": ours[-1],
                "mean": sum(ours) / len(ours),
                "mean_rounding_every_token": sum(theirs) / len(theirs),
                "growth": sum(ours[-5:]) / sum(ours[early - 5 : early]),
            }
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000, help="decode steps (default 4000)")
    parser.add_argument("--modes", nargs="+", choices=DRIFTING, default=DRIFTING)
    parser.add_argument("--memory", nargs="+", choices=MEMORIES, default=["long"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="where to write the table")
    options = parser.parse_args()
    rows = [
        row
        for name in options.memory
        for row in run(options.steps, options.modes, name, options.device)
    ]
    for row in rows:
        print(
            f"{row['mode']:18} {row['memory']:5} at 50 {row['at_50']:.2e}, "
            f"at 500 {row['at_500']:.2e}, at the end {row['at_end']:.2e}, mean {row['mean']:.2e} "
            f"(rounding every token {row['mean_rounding_every_token']:.2e}), "
            f"last / at 500: {row['growth']:.2f}"
        )
    machine = {"device": "cpu", "commit": measured_commit()}
    result = {**(environment() if options.device == "cuda" else machine), "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
