"""Time choosing tokens on a GPU: sampled rows of a large vocabulary against reading them once.

The bar of a case is 2.5 times the time of reading its logits; the last line is JSON. Before it is
timed, a case's tokens are compared with the reference's.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from harness import (
    Variant,
    read_pool,
    time_interleaved,
    write_rows,
)
from hybridspec.ops.sampling import SamplingTable, SamplingUses, choose, launch
from hybridspec.ops.sampling.call import Rows, Text

BAR = 2.5
SPREADS = {"flat": 1.0, "peaked": 6.0}
CASES = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "top_k and top_p": {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
}


def new_variant(
    name: str, columns: dict[str, float], logits: torch.Tensor, config: launch.LaunchConfig
) -> Variant:
    """Return a call that was compared with the reference."""
    num_rows, vocab = logits.shape
    table = SamplingTable.create(num_rows, vocab, device="cuda")
    table.seed.copy_(torch.arange(num_rows) * 977)
    for column, value in columns.items():
        getattr(table, column).fill_(value)
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    nothing = torch.zeros(num_rows, 1, dtype=torch.int32, device="cuda")
    others = (slots * 0, slots, nothing[:, :0].long(), nothing, nothing)
    rows = Rows(slots, others[0], None)
    out = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    has_noise, has_filters = bool(columns), len(columns) > 1
    uses = SamplingUses(has_noise=has_noise, has_filters=has_filters)

    def run() -> None:
        launch.choose(logits, rows, table, Text(*others[1:]), uses, out, config)

    run()
    expected = choose(
        logits, slots, others[0], table, *others[1:], uses=uses, backend="reference"
    )  # fmt: skip
    assert torch.equal(out, expected), f"{name}: {(out != expected).sum()} tokens differ"
    return Variant(name, run)


def measure(num_rows: int, vocab: int, spread: str, arguments: argparse.Namespace) -> list[dict]:
    """Time all cases of one size, interleaved with the reading of the logits."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(num_rows, vocab, device="cuda", generator=generator) * SPREADS[spread]
    chosen = launch.launch_config(num_rows, vocab)
    asked = {
        "tiles_per_program": arguments.tiles,
        "num_splits": arguments.splits,
        "num_warps": arguments.warps,
        "pick_warps": arguments.pick_warps,
        "weigh_warps": arguments.weigh_warps,
    }
    config = replace(chosen, **{name: value for name, value in asked.items() if value})
    out = torch.zeros(1, device="cuda")
    variants = [Variant("read", lambda: read_pool(logits, logits.numel(), out))]
    variants += [new_variant(name, case, logits, config) for name, case in CASES.items()]
    times = time_interleaved(variants, arguments.iterations)
    rows = []
    for name, timing in times.items():
        ratio = timing.median / times["read"].median
        print(
            f"{num_rows:4d} x {vocab:7d} {spread:7s} {name:16s} {timing.median:8.1f} us "
            f"(p20 {timing.p20:.1f}, p80 {timing.p80:.1f})  {ratio:5.2f} x reading",
            flush=True,
        )
        rows.append(
            {
                "rows": num_rows, "vocab": vocab, "logits": spread, "case": name,
                "median_us": round(timing.median, 2), "p20_us": round(timing.p20, 2),
                "p80_us": round(timing.p80, 2), "times_reading": round(ratio, 3),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    """Run all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32, 128])
    parser.add_argument("--vocab", type=int, nargs="+", default=[248_320])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--tiles", type=int, help="tiles that a program scans")
    parser.add_argument("--splits", type=int, help="programs of a row that weigh")
    parser.add_argument("--warps", type=int, help="warps of a program that scans")
    parser.add_argument("--pick-warps", type=int, help="warps of a program that picks")
    parser.add_argument("--weigh-warps", type=int, help="warps of a program that weighs")
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    rows = [
        row
        for vocab in arguments.vocab
        for num_rows in arguments.rows
        for spread in SPREADS
        for row in measure(num_rows, vocab, spread, arguments)
    ]
    wanted = [row for row in rows if (row["rows"], row["case"]) == (128, "top_p")]
    met = [row["times_reading"] <= BAR for row in wanted]
    write_rows(rows, arguments.json, bar=BAR, bar_is_met=all(met) if met else None)


if __name__ == "__main__":
    main()
