"""Bits per byte of the bundled model where its states are kept in another dtype; needs no GPU.

Held-out text goes through verify steps of four rows only, from an empty slot on: a random 0 to 4 of
the rows are committed and those that were not are fed again. Every byte is predicted once, by the
row that was committed. All dtypes see the same steps, so differences to fp32 are paired; their
standard error is over windows. Rings have the activation dtype.

    python tools/prepare_demo_data.py --docs python-doc --out demo-data --prompts demo-data/prompts
    python benchmarks/gdn_8bit_model.py --data demo-data \\
        --json benchmarks/results/gdn_8bit_model_cpu.json
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from pathlib import Path

import torch
import torch.nn.functional as F

from hybridspec.bundled import bundled_model_path
from hybridspec.models import load_model
from hybridspec.models.hybrid import HybridModel
from hybridspec.ops import ring as ring_ops
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import MemoryOptions, Pools
from measured_commit import measured_commit

DTYPES = ("float32", "bfloat16", "int8")
SIZE, WINDOW, PAGE, FILE_TOKEN = 4, 4096, 64, 256


def read_windows(path: Path) -> list[list[int]]:
    """Cut texts into windows that start empty; every byte of a text is predicted once."""
    windows = []
    for line in path.read_text("utf-8").splitlines():
        tokens = [FILE_TOKEN, *json.loads(line)["text"].encode()]
        starts = range(0, len(tokens) - 1, WINDOW)
        windows += [tokens[start : start + WINDOW + 1] for start in starts]
    return windows


class Decoder:
    """The model over pools of one state dtype, one slot for each window of a batch."""

    def __init__(self, model: HybridModel, state_dtype: str, num_slots: int) -> None:
        pages = -(-(WINDOW + SIZE) // PAGE)
        self.model = model
        options = MemoryOptions(dtype=model.dtype, state_dtype=getattr(torch, state_dtype))
        self.pools = Pools(
            model.memory_specs(options, has_head=False),
            num_slots=num_slots,
            num_pages=num_slots * pages,
            page_size=PAGE,
            max_pages_per_slot=pages,
            device=model.device,
        )
        table = torch.arange(num_slots * pages, dtype=torch.int32)
        self.pools.page_table.copy_(table.view(num_slots, pages))
        self.num_folds = 0

    def step(self, rows: dict[int, list[int]], num_committed: list[int]) -> torch.Tensor:
        """Feed the rows of some slots, commit the first of each; return logits of all rows."""
        pools = self.pools
        slots = list(rows)
        step = Step.of_rows(
            slots,
            [len(tokens) for tokens in rows.values()],
            pools.seq_len[slots].tolist(),
            torch.tensor([token for row in rows.values() for token in row]),
            is_prefill=False,
        )
        ring_ops.decide_folds(
            pools.history_len, step.slots, step.num_verify_tokens, step.is_fold,
            max_window=pools.max_window,
        )  # fmt: skip
        self.num_folds += int(step.is_fold.sum())
        logits = self.model.logits(self.model.forward(step, pools.memories))
        ring_ops.commit(
            pools.seq_len, pools.ring_start, pools.history_len, step.slots, step.is_fold,
            step.num_verify_tokens, torch.tensor(num_committed, dtype=torch.int32),
            ring_capacity=pools.ring_capacity,
        )  # fmt: skip
        return logits


def losses(model: HybridModel, windows: list[list[int]], dtype: str, seed: int) -> list[float]:
    """Return nats summed over each window."""
    decoder = Decoder(model, dtype, len(windows))
    generator = torch.Generator().manual_seed(seed)
    totals, done = [0.0] * len(windows), [0] * len(windows)
    while True:
        rows, kept = {}, []
        for i, tokens in enumerate(windows):
            accepted = int(torch.randint(0, SIZE + 1, (), generator=generator))
            left = len(tokens) - 1 - done[i]
            if left:
                rows[i] = tokens[done[i] : done[i] + min(SIZE, left)]
                kept.append(min(accepted, left))
        if not rows:
            assert decoder.num_folds > sum(done) / 20
            return totals
        logits = decoder.step(rows, kept)
        first = 0
        for (i, row), count in zip(rows.items(), kept, strict=True):
            target = windows[i][done[i] + 1 : done[i] + 1 + count]
            mine = logits[first : first + count]
            loss = F.cross_entropy(mine.double(), torch.tensor(target).long(), reduction="sum")
            totals[i] += loss.item() if count else 0.0
            done[i] += count
            first += len(row)


@torch.inference_mode()
def measure(model: HybridModel, windows: list[list[int]], batch: int) -> list[dict]:
    """Return a row of figures for each dtype."""
    found: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for first in range(0, len(windows), batch):
        for dtype, totals in found.items():
            totals += losses(model, windows[first : first + batch], dtype, seed=first)
        print(f"{min(first + batch, len(windows))} of {len(windows)} windows", flush=True)
    sizes = torch.tensor([len(tokens) - 1 for tokens in windows], dtype=torch.float64)
    table = []
    for dtype, totals in found.items():
        bits = torch.tensor(totals, dtype=torch.float64) / math.log(2)
        change = bits - torch.tensor(found["float32"], dtype=torch.float64) / math.log(2)
        mean = change.sum() / sizes.sum()
        spread = (change - mean * sizes).square().sum() * len(sizes) / max(len(sizes) - 1, 1)
        table.append(
            {
                "state": dtype,
                "bytes": int(sizes.sum()),
                "windows": len(windows),
                "bits_per_byte": (bits.sum() / sizes.sum()).item(),
                "change": mean.item(),
                "standard_error": (spread.sqrt() / sizes.sum()).item(),
                "largest_change_of_a_window": (change / sizes).abs().max().item(),
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of prepared data")
    parser.add_argument("--windows", type=int, help="windows of each kind (default: all)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", default="float32", help="of activations and rings")
    parser.add_argument("--json", type=Path, help="where to write the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(bundled_model_path(), dtype=getattr(torch, options.dtype))
    rows = []
    for kind in ("code", "docs"):
        windows = read_windows(options.data / f"heldout_{kind}.jsonl")
        count = options.windows or len(windows)
        chosen = [windows[i * len(windows) // count] for i in range(count)]
        for row in measure(model, chosen, options.batch):
            rows.append({"text": kind, "activations": options.dtype, **row})
            print(
                f"{kind} {row['state']:9} {row['bits_per_byte']:.5f} bits per byte, change "
                f"{row['change']:+.6f} (standard error {row['standard_error']:.6f}), at most "
                f"{row['largest_change_of_a_window']:.6f} in one window of {row['windows']}"
            )
    result = {
        "commit": measured_commit(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
