"""Draw the documents' plots from the committed results, all in one style, and a trace as printed.

Grey text and no background, so that they read in light and dark themes.

    python benchmarks/plots.py
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
PROMPT = """\
class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __eq__(self, other):
        """
OURS, PEER, SNAPSHOTS, OTHER, LIMIT = "#0f9d7a", "#e08a1e", "#b0579b", "#4c86c6", "#797979"
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
ENGINE_MODES = {
    "plain": ("plain decoding", LIMIT),
    "fixed": ("3 drafts, ring", OURS),
    "budget": ("3 drafts, ring, rows within a budget", OTHER),
    "snapshots": ("3 drafts, state snapshots (composed)", SNAPSHOTS),
    "transformers": ("transformers", PEER),
}
STYLE = {
    "axes.edgecolor": LIMIT,
    "axes.grid": True,
    "axes.labelcolor": LIMIT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": LIMIT,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.alpha": 0.25,
    "grid.color": LIMIT,
    "legend.framealpha": 0,
    "legend.labelcolor": LIMIT,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "hybridspec",  # the same file from the same figures
    "text.color": LIMIT,
    "xtick.color": LIMIT,
    "ytick.color": LIMIT,
}


def result(name: str) -> dict[str, Any]:
    """Read a committed result."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def ticks(axes: Any, labels: Sequence[object], what: str) -> None:
    """Number a row of measured sizes."""
    axes.set_xticks(range(len(labels)), [str(label) for label in labels])
    axes.set_xlabel(what)


def gdn_verify() -> Any:
    """Time of the recurrent verify step in multiples of its byte floor."""
    data = result("gdn_peers_h200.json")
    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True)
    colours = {"hybridspec": OURS, "FlashInfer": PEER, "state snapshots": SNAPSHOTS}
    for axes, case in zip(panels, ("nothing folds", "40 % folding"), strict=True):
        floors = data["byte floor, us"][case]
        # Below 32 requests launches decide, not bytes: those points say nothing of the limit.
        shown = [i for i, count in enumerate(data["requests"]) if count >= 32]
        for shift, (name, colour) in zip((-0.28, 0.0, 0.28), colours.items(), strict=True):
            times = [data[case][name][i] * data["state read, us"][i] / floors[i] for i in shown]
            places = [i + shift for i in range(len(shown))]
            bars = axes.bar(places, times, width=0.26, color=colour, label=name)
            axes.bar_label(bars, fmt="%.2f", padding=1, fontsize=8)
        axes.axhline(1, color=LIMIT, linestyle="--", label="bytes at 4.27 TB/s")
        axes.set_title(case)
        axes.grid(visible=False, axis="x")
        ticks(axes, [data["requests"][i] for i in shown], "requests")
    panels[0].set(ylabel="multiples of the byte floor", ylim=(0, 8.8))
    panels[1].legend(loc="upper center", ncols=2)
    return figure


def attention_verify() -> Any:
    """Rate of attention over pages against the bytes of a step, beside FlashAttention-3."""
    rows = result("attention_verify_h200.json")["rows"]
    figure, axes = pyplot.subplots(figsize=(8, 3))
    for variant, label, colour, mark in (
        ("triton, page 16", "hybridspec, pages of 16", OURS, "o"),
        ("fa3 with append", "FlashAttention-3 and its append", PEER, "x"),
    ):
        mine = [row for row in rows if row["variant"] == variant]
        axes.scatter(
            [row["bytes"] / 1e6 for row in mine],
            [row["tb_per_s"] for row in mine],
            marker=mark,
            color=colour,
            label=label,
        )
    axes.axhline(4.27, color=LIMIT, linestyle="--", label="best read rate")
    axes.set(xscale="log", xlabel="megabytes a step", ylabel="TB/s", ylim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="lower right")
    return figure


def acceptance() -> Any:
    """Share of steps in which the first k drafts are right, and tokens that k drafts bring."""
    rows = result("acceptance_cpu.json")["rows"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3))
    for row in rows:
        colour = OURS if row["kind"] == "code" else PEER
        line = "-" if row["temperature"] == 0 else ":"
        how = "greedy" if row["temperature"] == 0 else "temperature 0.8"
        shares = [100 * share for share in row["accepted_up_to"]]
        left.plot(range(1, 8), shares, line, marker="o", color=colour)
        label = f"{row['kind']}, {how}"
        right.plot(range(8), row["committed_per_step"], line, marker="o", color=colour, label=label)
    left.set(xlabel="drafts", ylabel="% of steps in which all are right", ylim=(0, 100))
    right.set(xlabel="drafts a step", ylabel="tokens a step", ylim=(0, None))
    right.legend(loc="lower right")
    return figure


def drift() -> Any:
    """Error of the recurrent state after 4,000 steps, with a ring and without."""
    rows = [
        row for row in result("gdn_drift_h200.json")["rows"] if "mean_rounding_every_token" in row
    ]
    figure, axes = pyplot.subplots(figsize=(8, 3))
    for shift, key, colour, label in (
        (-0.2, "mean", OURS, "folded out of the ring"),
        (0.2, "mean_rounding_every_token", SNAPSHOTS, "rounded after every token"),
    ):
        places = [i + shift for i in range(len(rows))]
        axes.bar(places, [row[key] for row in rows], width=0.38, color=colour, label=label)
    labels = ["\n".join(SHORT[dtype] for dtype in row["dtypes"]) for row in rows]
    ticks(axes, labels, "dtype of activations, state and ring, from top to bottom")
    axes.grid(visible=False, axis="x")
    axes.set(yscale="log", ylabel="relative error of the state", ylim=(None, 0.3))
    axes.legend()
    return figure


def engine(rows: Sequence[dict[str, Any]]) -> Any:
    """Tokens per second against requests, and over plain decoding's; None without a plain row."""
    rates: dict[str, dict[int, float]] = {}
    for row in rows:
        rates.setdefault(row["mode"], {})[row["requests"]] = row["tokens_per_s"]
    plain = rates.get("plain")
    if not plain:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3))
    places = {count: i for i, count in enumerate(sorted(plain))}
    for mode, (label, colour) in ENGINE_MODES.items():
        rate = {count: rate for count, rate in rates.get(mode, {}).items() if count in plain}
        if rate:
            at = [places[count] for count in rate]
            left.plot(at, list(rate.values()), marker="o", color=colour, label=label)
            over = [value / plain[count] for count, value in rate.items()]
            right.plot(at, over, marker="o", color=colour, label=label)
    for axes in (left, right):
        ticks(axes, list(places), "requests")
    left.set(yscale="log", ylabel="tokens per second")
    left.yaxis.set_major_formatter("{x:,.0f}")
    right.set(ylabel="times plain decoding", ylim=(0, None))
    right.legend(loc="lower left")
    return figure


def engine_throughput() -> Any:
    """The same of the committed run."""
    return engine(result("engine_throughput_h200.json").get("rows", ()))


def write_trace(path: Path) -> None:
    """Write what `hybridspec generate --trace` prints in a terminal of 76 columns."""
    words = ["generate", PROMPT, "--trace", "--max-tokens", "66"]
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "76", "LINES": "40"}
    command = [sys.executable, "-m", "hybridspec", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    shown = done.stdout.partition("╭")[0].rstrip()  # how fast it was is another day's figure
    console = Console(record=True, width=76, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title="hybridspec generate --trace", unique_id="trace")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # nothing from elsewhere
    path.write_text(svg, encoding="utf-8")


PLOTS: dict[str, Callable[[], Any]] = {
    "acceptance": acceptance,
    "attention_verify": attention_verify,
    "drift": drift,
    "engine_throughput": engine_throughput,
    "gdn_verify": gdn_verify,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/images", help="where to draw")
    folder = parser.parse_args().folder
    with matplotlib.rc_context(STYLE):
        for name, draw in PLOTS.items():
            figure = draw()
            if figure is None:
                print(f"{name}: no figures to draw")
                continue
            figure.tight_layout()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)
            print(folder / f"{name}.svg")
    write_trace(folder / "trace.svg")
    print(folder / "trace.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
