"""Whether it matters where in a batch the folding requests stand: first, last or scattered.

A fold reads and writes a whole checkpoint, so its programs take longer than the others; programs
start in the order of the batch. The same requests are verified in three orders, in turn, each
checked against the reference first (`gdn_verify.py`, whose cases these are).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from gdn_verify import Call, Setting
from harness import Variant, environment, read_pool, time_interleaved
from hybridspec.ops import gated_delta_rule


def variant(call: Call, name: str, order: torch.Tensor) -> Variant:
    """Verify the call's requests in an order, [B]."""
    slots, is_fold = call.slots[order].contiguous(), call.marks[order].contiguous()

    def run() -> None:
        state, k, u, cum = call.working
        gated_delta_rule.verify(
            *call.rows, *call.params, state, call.ring(k, u, cum), call.cu_seqlens, slots,
            max_verify_tokens=max(call.lengths), is_fold=is_fold, out=call.out,
        )  # fmt: skip

    return Variant(name, run, call.restore)


def measure(batch: int, share: float, rows: int, iterations: int) -> dict[str, object]:
    """Microseconds of each order."""
    setting = Setting(batch, share, rows=rows, mode="fp32_state", geometry="16/32")
    call = Call(setting)
    call.check(call.verify, "verify")
    first = torch.argsort(call.marks.int(), descending=True, stable=True)
    sink = torch.empty(1, device="cuda")
    state = call.working[0]
    variants = [
        variant(call, "scattered", torch.arange(batch, device="cuda")),
        variant(call, "first", first),
        variant(call, "last", first.flip(0)),
        Variant("state read", lambda: read_pool(state, state.numel(), sink)),
    ]
    found = time_interleaved(variants, iterations)
    return {
        "batch": batch, "share": share, "rows": rows,
        **{name: round(timing.median, 2) for name, timing in found.items()},
    }  # fmt: skip


def main() -> None:
    """Measure; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--limit", type=int, help="only the first settings")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = [(b, s, t) for t in (4, 1) for b in (8, 32, 64, 128, 256) for s in (0.1, 0.25)]
    rows = []
    for batch, share, count in settings[: args.limit]:
        rows.append(measure(batch, share, count, args.iterations))
        print(rows[-1], flush=True)
    text = json.dumps({"benchmark": "gdn_fold_order", **environment(), "rows": rows})
    if args.json:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
