"""The quickest algorithm of each product, measured where it runs.

What was found is kept on disk: the next process with the same device, library and sizes takes the
same algorithms, so that it computes the same bits, and starts sooner.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec.ops import _kernel_cache
from hybridspec.ops._row_order import random_rows
from hybridspec.ops.products import cublaslt
from hybridspec.ops.products.cublaslt import Case, Product

__all__ = ["Run", "Use", "measured"]

_ROUNDS = 4
_FINALISTS = 6  # of the first round, that run in the others
_CALLS = 6  # of a round, with other weights, so that none lies in the L2 cache
_GAIN = 0.97  # of torch's time: what is not quicker than that is not worth another algorithm
_TOLERANCE = 0.02  # of the largest element: two roundings to 16 bits
_WAIT_CYCLES = 600_000  # the device waits, as long as the host takes for the calls of a round

Run = Callable[[Tensor, Tensor, Tensor], None]  # x [N, D], weight [F, D], out [N, F]


class Use(NamedTuple):
    """Something that is done with a product.

    Attributes:
        cases: ways to make the product.
        weights: that it is made with, of one shape, contiguous.
        with_torch: does it torch's way.
        with_product: returns what does it with a product of one of the cases.
        out_dtype: of the result.
    """

    cases: Sequence[Case]
    weights: Sequence[Tensor]
    with_torch: Run
    with_product: Callable[[Product], Run]
    out_dtype: torch.dtype


def measured(uses: Sequence[Use], workspace: Tensor) -> list[Product | None]:
    """Return for each use the product that makes it quicker than torch does, or None.

    Args:
        uses: what is looked at.
        workspace: cublaslt.WORKSPACE_BYTES of scratch.
    """
    named = [[[str(part) for case in use.cases for part in case], len(use.weights)] for use in uses]
    key = _kernel_cache.digest_of(
        b"products", str(cublaslt.library_version()).encode(), torch.__version__.encode(),
        torch.cuda.get_device_name(workspace.device).encode(), json.dumps(named).encode(),
    )  # fmt: skip

    def measure() -> bytes:
        found = [_quickest(use, workspace) for use in uses]
        return json.dumps([one and [one[0], one[1].hex()] for one in found]).encode()

    kept = json.loads(_kernel_cache.cached(key, measure))
    return [
        one and Product(use.cases[one[0]], bytes.fromhex(one[1]), workspace)
        for use, one in zip(uses, kept, strict=True)
    ]


def _quickest(use: Use, workspace: Tensor) -> tuple[int, bytes] | None:
    """Return the case and the algorithm that are the quickest, or None if torch is as quick."""
    rows, weight = use.cases[0].rows, use.weights[0]
    x = random_rows(rows, weight.shape[1], weight)
    out = torch.zeros(rows, weight.shape[0], device=x.device, dtype=use.out_dtype)
    runs: dict[tuple[int, bytes], Run] = {}
    for number, case in enumerate(use.cases):
        for algorithm in cublaslt.candidates(case, x.device.index):
            try:
                run = use.with_product(Product(case, algorithm, workspace))
            except RuntimeError:
                continue
            runs[number, algorithm] = run
    use.with_torch(x, weight, out)
    expected = out.to(torch.float32, copy=True)
    allowed = _TOLERANCE * expected.abs().max()
    for name, run in list(runs.items()):
        run(x, weight, out.zero_())
        if not bool(((out.float() - expected).abs().max() <= allowed).item()):
            del runs[name]
    names, every = list(runs), list(runs.values())
    first = _times(every, x, use.weights, out, 1)
    finalists = sorted(range(len(names)), key=first.__getitem__)[:_FINALISTS]
    final = [use.with_torch, *(every[i] for i in finalists)]
    of_torch, *others = _times(final, x, use.weights, out, _ROUNDS)
    time, best = min(zip(others, finalists, strict=True), default=(of_torch, 0))
    return names[best] if time < _GAIN * of_torch else None


def _times(
    runs: Sequence[Run], x: Tensor, weights: Sequence[Tensor], out: Tensor, rounds: int
) -> list[float]:
    """Return milliseconds of each, in turn, medians; the device never waits for the host."""
    marks = []
    for _ in range(rounds):
        for run in runs:
            torch.cuda._sleep(_WAIT_CYCLES)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for i in range(_CALLS):
                run(x, weights[i % len(weights)], out)
            end.record()
            marks.append((begin, end))
    torch.cuda.synchronize()
    spans = [begin.elapsed_time(end) for begin, end in marks]
    return [statistics.median(spans[i :: len(runs)]) for i in range(len(runs))]
