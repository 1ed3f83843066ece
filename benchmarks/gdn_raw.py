"""Time verify over a raw ring beside verify over a ring of corrections, in one run.

Both get the same rows, states, windows and marks: live windows of 8 rows, folding ones of 12, which
with the T = 4 rows of the step is the most that a raw ring takes. Every call is compared with the
reference in fp64 on a few requests before it is timed. The bar is the ratio of the two.

    python benchmarks/gdn_raw.py --json benchmarks/results/gdn_raw_h200.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from gdn_verify import CAPACITY, CHECKED, HEAD_DIM, MODES, TOLERANCES, Call, Setting
from harness import (
    Variant,
    read_pool,
    time_interleaved,
    write_rows,
)
from hybridspec.ops import gated_delta_rule
from hybridspec.ops.ring import RawRingView

ROWS, HISTORY, LONGEST = 4, 8, 12


class RawCall:
    """The raw ring of a setting, its copy, and the calls to time; the rest is that of `Call`."""

    def __init__(self, call: Call) -> None:
        self.call = call
        generator = torch.Generator("cuda").manual_seed(1)
        _, state, ring = MODES[call.setting.mode]
        slots = call.pristine[0].shape[0]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(slots, *shape, generator=generator, device="cuda")

        self.pristine = [
            call.pristine[0],
            normal(call.heads, CAPACITY, HEAD_DIM).to(ring),
            normal(call.value_heads, CAPACITY, HEAD_DIM).to(ring),
            normal(call.value_heads, CAPACITY),
            normal(call.value_heads, CAPACITY),
        ]
        self.working = [part.clone() for part in self.pristine]

    def ring(self, k: torch.Tensor, *others: torch.Tensor) -> RawRingView:
        return RawRingView(k, *others, *self.call.cursors, LONGEST)

    def restore(self) -> None:
        """Put back everything that a step changes."""
        self.call.restore()
        skipped = 0 if self.call.setting.share else 1
        for part, copy in list(zip(self.working, self.pristine, strict=True))[skipped:]:
            part.copy_(copy)

    def verify(self, backend: str) -> None:
        call, (state, *ring) = self.call, self.working
        gated_delta_rule.verify_raw(
            *call.rows, *call.params, state, self.ring(*ring), call.cu_seqlens, call.slots,
            max_verify_tokens=ROWS, is_fold=call.is_fold, out=call.out, backend=backend,
        )  # fmt: skip

    def check(self, backend: str) -> None:
        """Raise unless a few requests agree with the reference in fp64."""
        call = self.call
        self.restore()
        call.out.fill_(torch.nan)
        self.verify(backend)
        index = torch.linspace(0, call.setting.batch - 1, CHECKED).long().unique()
        taken = (ROWS * index[:, None] + torch.arange(ROWS)).flatten().cuda()
        slots = call.slots[index.cuda()].long()
        state, *ring = (part[slots].double() for part in self.pristine)
        cursors = (cursor[slots] for cursor in call.initial_cursors)
        some = torch.arange(len(index) + 1, dtype=torch.int32, device="cuda")
        expected = gated_delta_rule.verify_raw(
            *(part[taken].double() for part in call.rows), *call.params, state,
            RawRingView(*ring, *cursors, LONGEST), ROWS * some, some[:-1],
            max_verify_tokens=ROWS, is_fold=call.marks[index.cuda()], backend="reference",
        )  # fmt: skip
        bound = max(TOLERANCES[dtype] for dtype in MODES[call.setting.mode])
        pairs = [(call.out[taken], expected)]
        pairs += list(zip([part[slots] for part in self.working], (state, *ring), strict=True))
        for part, right in pairs:
            error = (part.double() - right).norm() / right.norm()
            if not error <= bound:
                raise AssertionError(f"raw {backend}: wrong by {error:.2e} in {call.setting}")


def measure(setting: Setting, iterations: int) -> list[dict]:
    """Check, then time both rings in one interleaved run."""
    call = Call(setting)
    raw = RawCall(call)
    call.check(call.verify, "ucache")
    pool, sink = call.pristine[0], torch.empty(1, device="cuda")
    num_elements = pool[: setting.batch].numel()
    runs: dict[str, Callable[[], object]] = {"ucache": call.verify}
    variants = [
        Variant("state read", lambda: read_pool(pool, num_elements, sink)),
        Variant("ucache", runs["ucache"], call.restore),
    ]
    for backend in ("cuda", "triton"):
        raw.check(backend)
        run = lambda backend=backend: raw.verify(backend)  # noqa: E731
        variants.append(Variant(f"raw, {backend}", run, raw.restore))
    timings = time_interleaved(variants, iterations)
    return [
        vars(setting)
        | {"variant": name}
        | {part: round(value, 2) for part, value in vars(timing).items()}
        | {
            "x_state_read": round(timing.median / timings["state read"].median, 3),
            "x_ucache": round(timing.median / timings["ucache"].median, 3),
        }
        for name, timing in timings.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64, 256], help="requests")
    parser.add_argument("--share", type=float, nargs="+", default=[0.0, 0.33], help="that folds")
    parser.add_argument("--mode", nargs="+", choices=("bf16", "fp32_state"), default=["bf16"])
    parser.add_argument("--iters", type=int, default=60, help="replays (default 60)")
    parser.add_argument("--json", type=Path, help="where to write all rows")
    options = parser.parse_args()
    rows: list[dict] = []
    for mode in options.mode:
        for batch in options.batch:
            for share in options.share:
                setting = Setting(
                    batch, share, ROWS, HISTORY, mode, max_window=LONGEST + ROWS - 1
                )  # fmt: skip
                for row in measure(setting, options.iters):
                    rows.append(row)
                    print(
                        f"B {batch:4} {share:4.0%} {mode:10} {row['variant']:12} "
                        f"{row['median']:7.1f} us ({row['p20']:.1f}..{row['p80']:.1f}) "
                        f"{row['x_state_read']:6.3f} x read {row['x_ucache']:6.3f} x ucache"
                    )
                torch.cuda.empty_cache()
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
