"""Timing of CUDA calls: graph replay, cold L2, inputs put back, variants interleaved."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    raise SystemExit("needs Triton: pip install -e '.[triton]'") from None

from measured_commit import measured_commit
from spread import median_and_fifths

__all__ = [
    "BEST_READ_RATE",
    "Timing",
    "Variant",
    "environment",
    "need_gpu",
    "read_pool",
    "time_interleaved",
    "write_rows",
]

# Bytes per second; the best read rate seen on an H200.
BEST_READ_RATE = 4.27e12
_FLUSH_BYTES = 256 * 2**20
_READ_BLOCK = 16384


@triton.jit
def _read_kernel(pool_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(pool_ptr + offs).to(tl.float32))
    if total == 1.2345e30:
        tl.store(out_ptr, total)


def read_pool(pool: torch.Tensor, num_elements: int, out: torch.Tensor) -> None:
    """Only read the first elements of a pool: the yardstick beside every figure."""
    _read_kernel[(num_elements // _READ_BLOCK,)](pool, out, _READ_BLOCK, num_warps=4)


@dataclass(frozen=True)
class Variant:
    """What is timed.

    Attributes:
        name: for the table.
        run: the timed call; captured in a graph.
        restore: puts back what the call changes; not timed.
    """

    name: str
    run: Callable[[], object]
    restore: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Timing:
    """Microseconds of one variant."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        return cls(*median_and_fifths(times))


def time_interleaved(variants: list[Variant], iterations: int) -> dict[str, Timing]:
    """Replay each variant's graph in turn, `iterations` times, L2 overwritten before each."""
    graphs = []
    for variant in variants:
        variant.restore()
        variant.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            variant.run()
        graphs.append(graph)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for iteration in range(iterations):
        for variant, graph in zip(variants, graphs, strict=True):
            variant.restore()
            flush.fill_(iteration % 100)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[variant.name].append(1e3 * begin.elapsed_time(end))
    return {name: Timing.of(values) for name, values in times.items()}


def need_gpu() -> None:
    """End the script with one line where there is nothing to measure on."""
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device, torch finds none")


def write_rows(rows: Sequence[Any], file: Path | None, **more: Any) -> None:
    """Print what a run found as a line of JSON, with its environment, and keep it in a file."""
    result = {**environment(), **more, "rows": rows}
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def environment() -> dict[str, str]:
    """GPU, versions and commit of a run."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": measured_commit(),
    }
