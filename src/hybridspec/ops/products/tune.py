"""The quickest algorithm of each product, measured where it runs.

What was found is kept on disk: the next process with the same device, library and sizes takes the
same algorithms, so that it computes the same bits, and starts sooner.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hybridspec.ops import _kernel_cache
from hybridspec.ops._row_order import random_rows
from hybridspec.ops.products import cublaslt
from hybridspec.ops.products.cublaslt import Case, Product

__all__ = ["Use", "measured"]

_ROUNDS = 5
_CALLS = 6  # of a round, with other weights, so that none lies in the L2 cache
_GAIN = 0.97  # of torch's time: what is not quicker than that is not worth another algorithm
_TOLERANCE = 0.02  # of the largest element: two roundings to 16 bits
_WAIT_CYCLES = 2_000_000  # the device waits, so that the host is ahead of it

# A kind of product, the weights that it is made with, and torch's way to do it.
Use = tuple[Case, Sequence[Tensor], Callable[[Tensor, Tensor, Tensor], None]]


def measured(uses: Sequence[Use], workspace: Tensor) -> dict[Case, Product]:
    """Return the products that are quicker by an algorithm of their own than torch makes them.

    Args:
        uses: what is looked at; weights of one shape, contiguous.
        workspace: cublaslt.WORKSPACE_BYTES of scratch.
    """
    named = [
        [*case[:3], str(case.dtype), str(case.out_dtype), case.adds, len(weights)]
        for case, weights, _ in uses
    ]
    key = _kernel_cache.digest_of(
        b"products", str(cublaslt.library_version()).encode(), torch.__version__.encode(),
        torch.cuda.get_device_name(workspace.device).encode(), json.dumps(named).encode(),
    )  # fmt: skip

    def measure() -> bytes:
        found = [_quickest(*use, workspace) for use in uses]
        return json.dumps([None if one is None else one.hex() for one in found]).encode()

    kept = json.loads(_kernel_cache.cached(key, measure))
    return {
        case: Product(case, bytes.fromhex(algorithm), workspace)
        for (case, _, _), algorithm in zip(uses, kept, strict=True)
        if algorithm is not None
    }


def _quickest(
    case: Case,
    weights: Sequence[Tensor],
    torch_run: Callable[[Tensor, Tensor, Tensor], None],
    workspace: Tensor,
) -> bytes | None:
    """Return the quickest algorithm, or None if torch's is as quick."""
    x = random_rows(case.rows, case.terms, weights[0])
    out = torch.zeros(case.rows, case.columns, device=x.device, dtype=case.out_dtype)
    runs: dict[bytes, Callable[[Tensor, Tensor, Tensor], None]] = {b"": torch_run}
    for algorithm in cublaslt.candidates(case, x.device.index):
        try:
            runs[algorithm] = Product(case, algorithm, workspace).run
        except RuntimeError:
            continue
    torch_run(x, weights[0], out)
    expected = out.to(torch.float32, copy=True)
    allowed = _TOLERANCE * expected.abs().max()
    for name, run in list(runs.items()):
        run(x, weights[0], out.zero_())
        if not bool(((out.float() - expected).abs().max() <= allowed).item()):
            del runs[name]
    times = _times(runs.values(), x, weights, out)
    best = min(zip(times, runs, strict=True))
    return best[1] if b"" in runs and best[0] < _GAIN * times[0] else None


def _times(
    runs: Iterable[Callable[[Tensor, Tensor, Tensor], None]],
    x: Tensor,
    weights: Sequence[Tensor],
    out: Tensor,
) -> list[float]:
    """Return milliseconds of each, in turn, medians; the host is far ahead of the device."""
    runs, marks = list(runs), []
    for _ in range(_ROUNDS):
        torch.cuda._sleep(_WAIT_CYCLES)
        for run in runs:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for i in range(_CALLS):
                run(x, weights[i % len(weights)], out)
            end.record()
            marks.append((begin, end))
    torch.cuda.synchronize()
    spans = [begin.elapsed_time(end) for begin, end in marks]
    return [statistics.median(spans[i :: len(runs)]) for i in range(len(runs))]
