"""Does the tensor cache help? Against `torch.empty`, and against operators that make their outputs.

Three questions, on the CPU and, where there is one, on a CUDA device: what an alloc costs the host;
what an alloc and a first write cost; what a step costs that makes all its activations anew, with
its hit rate and its peak memory. The results of a step must agree before it is timed. Variants
are interleaved; medians over the rounds, with the 20th and the 80th percentile in the JSON.

    python benchmarks/tensor_cache.py --json benchmarks/results/tensor_cache.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import hybridspec
from hybridspec.runtime.tensor_cache import TensorCache
from measured_commit import measured_commit
from spread import median_and_fifths

Alloc = Callable[[tuple[int, ...], torch.dtype], Tensor]
SHAPES = [(4, 192), (64, 2048), (1024, 8192), (4096, 8192)]
CROWD = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step: layers of one size over a number of rows, which may change from step to step."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    rows: Sequence[int]
    dtype: torch.dtype


CASES = {
    "cpu": [
        Case(name="bundled size, 4 rows", num_layers=8, hidden=192, intermediate=512, rows=[4],
             dtype=torch.float32),
        Case(name="bundled size, 256 rows", num_layers=8, hidden=192, intermediate=512, rows=[256],
             dtype=torch.float32),
        Case(name="bundled size, 1 to 64 rows", num_layers=8, hidden=192, intermediate=512,
             rows=[1, 17, 4, 64, 33, 9, 50, 2, 28, 61], dtype=torch.float32),
        Case(name="bundled size, 2048 rows", num_layers=8, hidden=192, intermediate=512,
             rows=[2048], dtype=torch.float32),
    ],
    "cuda": [
        Case(name="0.8B size, 4 rows", num_layers=24, hidden=1024, intermediate=3584, rows=[4],
             dtype=torch.bfloat16),
        Case(name="4B size, 64 rows", num_layers=32, hidden=2560, intermediate=9216, rows=[64],
             dtype=torch.bfloat16),
        Case(name="4B size, 1 to 256 rows", num_layers=32, hidden=2560, intermediate=9216,
             rows=[1, 97, 4, 256, 33, 9, 150, 2, 28, 211], dtype=torch.bfloat16),
        Case(name="4B size, 8192 rows", num_layers=32, hidden=2560, intermediate=9216, rows=[8192],
             dtype=torch.bfloat16),
    ],
}  # fmt: skip


class Weights:
    """The matrices of one layer; all layers share them, so that a step stays small."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(0)

        def matrix(rows: int, columns: int) -> Tensor:
            values = torch.randn(rows, columns, generator=generator) * rows**-0.5
            return values.to(device, case.dtype)

        self.mix_in = matrix(case.hidden, 3 * case.hidden)
        self.mix_out = matrix(case.hidden, case.hidden)
        self.gate_up = matrix(case.hidden, 2 * case.intermediate)
        self.down = matrix(case.intermediate, case.hidden)


def step_with(alloc: Alloc, weights: Weights, x: Tensor) -> Tensor:
    """One step whose every activation comes from `alloc`."""
    rows, dtype = x.shape[0], x.dtype
    hidden, intermediate = weights.case.hidden, weights.case.intermediate
    for _ in range(weights.case.num_layers):
        mixed = alloc((rows, 3 * hidden), dtype)
        torch.mm(x, weights.mix_in, out=mixed)
        gated = alloc((rows, 3 * hidden), dtype)
        torch.sigmoid(mixed, out=gated)
        product = alloc((rows, hidden), dtype)
        torch.mul(gated[:, :hidden], mixed[:, hidden : 2 * hidden], out=product)
        del mixed, gated
        mix_out = alloc((rows, hidden), dtype)
        torch.mm(product, weights.mix_out, out=mix_out)
        middle = alloc((rows, hidden), dtype)
        torch.add(x, mix_out, out=middle)
        del product, mix_out
        gate_up = alloc((rows, 2 * intermediate), dtype)
        torch.mm(middle, weights.gate_up, out=gate_up)
        gate = alloc((rows, intermediate), dtype)
        torch.sigmoid(gate_up[:, :intermediate], out=gate)
        gate.mul_(gate_up[:, intermediate:])
        del gate_up
        down = alloc((rows, hidden), dtype)
        torch.mm(gate, weights.down, out=down)
        x = alloc((rows, hidden), dtype)
        torch.add(middle, down, out=x)
    return x


def step_plain(weights: Weights, x: Tensor) -> Tensor:
    """The same step as one would write it: every operator makes its output."""
    hidden, intermediate = weights.case.hidden, weights.case.intermediate
    for _ in range(weights.case.num_layers):
        mixed = torch.mm(x, weights.mix_in)
        gated = torch.sigmoid(mixed)
        product = gated[:, :hidden] * mixed[:, hidden : 2 * hidden]
        del mixed, gated
        middle = x + torch.mm(product, weights.mix_out)
        del product
        gate_up = torch.mm(middle, weights.gate_up)
        gate = torch.sigmoid(gate_up[:, :intermediate])
        gate.mul_(gate_up[:, intermediate:])
        del gate_up
        x = middle + torch.mm(gate, weights.down)
    return x


class Meter:
    """Counts allocations and the bytes of tensors alive at once."""

    def __init__(self, alloc: Alloc) -> None:
        self.alloc = alloc
        self.count = self.live_bytes = self.peak_bytes = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = self.alloc(shape, dtype)
        self.count += 1
        self.live_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(tensor, self.drop, tensor.nbytes)
        return tensor

    def drop(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


def interleave(
    variants: dict[str, Callable[[], object]], device: torch.device, *, rounds: int, calls: int
) -> dict[str, dict[str, float]]:
    """Time all variants in turn; microseconds per call, the device's work included."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for round_index in range(rounds + 1):
        for name, function in variants.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                function()
            synchronize(device)
            if round_index:  # the first is the warm-up
                samples[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: summary(values) for name, values in samples.items()}


def summary(values: list[float]) -> dict[str, float]:
    """Median and outer fifths."""
    return dict(zip(("median", "p20", "p80"), median_and_fifths(values), strict=True))


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_on(device: torch.device) -> Alloc:
    """Return `torch.empty` in the cache's form."""

    def alloc(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return alloc


def measure_alloc(
    device: torch.device, rounds: int, limit: int | None = None
) -> list[dict[str, object]]:
    """Time an alloc that is dropped at once: alone, among live tensors of its shape, written."""
    results = []
    for shape in SHAPES[:limit]:
        with TensorCache(device) as cache:
            allocs = {"empty": partial(torch.empty, device=device), "cache": cache.alloc}
            calls = {name: partial(alloc, shape, dtype=torch.bfloat16)
                     for name, alloc in allocs.items()}  # fmt: skip
            writes = {name: lambda call=call: call().fill_(1.0) for name, call in calls.items()}
            result: dict[str, object] = {"shape": shape}
            result["alloc_us"] = interleave(calls, device, rounds=rounds, calls=500)
            result["alloc_and_fill_us"] = interleave(writes, device, rounds=rounds, calls=20)
            crowd = [cache.alloc(shape, torch.bfloat16) for _ in range(CROWD)]
            crowded = interleave(calls, device, rounds=rounds, calls=500)
            result[f"alloc_among_{len(crowd)}_us"] = crowded
            results.append(result)
    return results


def peak_of(function: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Return what torch's CUDA allocator gave out and held at most during a call, above before."""
    if device.type != "cuda":
        return {}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    function()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(device) - before[0],
        "reserved_bytes": torch.cuda.max_memory_reserved(device) - before[1],
    }


def measure_step(case: Case, device: torch.device, rounds: int) -> dict[str, object]:
    """Check that all variants of a step agree, then measure memory, hits and time."""
    weights = Weights(case, device)
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(rows, case.hidden, generator=generator).to(device, case.dtype)
        for rows in case.rows
    ]

    def all_steps(step: Callable[[Tensor], Tensor]) -> None:
        for x in inputs:
            step(x)

    with TensorCache(device) as cache:
        empty = empty_on(device)
        steps = {
            "plain": partial(step_plain, weights),
            "empty": partial(step_with, empty, weights),
            "cache": partial(step_with, cache.alloc, weights),
        }
        for x in inputs:
            expected = steps["plain"](x)
            for name, step in steps.items():
                torch.testing.assert_close(step(x), expected, msg=name)
            del expected
        cache.evict()
        peaks = {name: peak_of(partial(all_steps, step), device) for name, step in steps.items()}
        meter = Meter(empty)
        all_steps(partial(step_with, meter, weights))
        all_steps(steps["cache"])
        before = cache.stats()
        for _ in range(3):
            all_steps(steps["cache"])
        after = cache.stats()
        calls = 1 if max(case.rows) > 512 else 5
        time_us = interleave(
            {name: partial(all_steps, step) for name, step in steps.items()},
            device,
            rounds=rounds,
            calls=calls,
        )
    num_hits = after.num_hits - before.num_hits
    num_misses = after.num_misses - before.num_misses
    return {
        "case": case.name,
        "allocs_per_step": meter.count / len(inputs),
        "hit_rate": num_hits / (num_hits + num_misses),
        "time_us": {
            name: {key: value / len(inputs) for key, value in values.items()}
            for name, values in time_us.items()
        },
        "live_peak_bytes": meter.peak_bytes,
        "cache_held_bytes": after.held_bytes,
        "peaks": peaks,
    }


def print_tables(name: str, allocs: list[dict], steps: list[dict]) -> None:
    """Print the medians."""
    print(f"\n{name}: microseconds per alloc, torch.empty -> cache")
    for result in allocs:
        cells = [
            f"{key.removesuffix('_us')} {value['empty']['median']:.2f} -> "
            f"{value['cache']['median']:.2f}"
            for key, value in result.items()
            if key != "shape"
        ]
        print(f"  {result['shape']!s:14} {'   '.join(cells)}")
    print(f"{name}: a step; microseconds without alloc, with torch.empty, with the cache")
    for result in steps:
        times = " ".join(f"{value['median']:9.1f}" for value in result["time_us"].values())
        peaks = "   ".join(
            f"{key} peak {value['allocated_bytes'] / 2**20:.2f} MiB"
            for key, value in result["peaks"].items()
            if value
        )
        print(
            f"  {result['case']:27} {times}   hits {result['hit_rate']:.3f}   "
            f"live {result['live_peak_bytes'] / 2**20:.2f} MiB, "
            f"held {result['cache_held_bytes'] / 2**20:.2f} MiB   {peaks}"
        )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default 15)")
    parser.add_argument("--limit", type=int, help="only the first shapes and cases")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument(
        "--devices",
        nargs="+",
        choices=["cpu", "cuda"],
        default=["cpu", "cuda"],
        help="what to measure, if present (default both)",
    )
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    """Measure the devices that are there."""
    args = arguments()
    torch.set_num_threads(args.threads)
    result: dict[str, object] = {
        "benchmark": "tensor_cache",
        "hybridspec": hybridspec.__version__,
        "commit": measured_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": args.threads,
        "rounds": args.rounds,
        "devices": {},
    }
    for device in map(torch.device, args.devices):
        if device.type == "cuda" and not torch.cuda.is_available():
            continue
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        allocs = measure_alloc(device, args.rounds, args.limit)
        cases = CASES[device.type][: args.limit]
        steps = [measure_step(case, device, args.rounds) for case in cases]
        print_tables(name, allocs, steps)
        result["devices"][name] = {"allocs": allocs, "steps": steps}
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
