"""Decode steps as CUDA graphs, one for each size of a ladder.

A graph holds the whole step, target and drafter, with every option of choosing tokens: what a batch
needs stands in its slots' columns. Lanes that a batch does not fill are slot -1. All graphs share
one memory pool, since no two run at the same time and what one leaves is copied before the next.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops.verify_plan import Step
from hybridspec.speculate import Asks, Decoder, Outcome, decode_step

__all__ = ["StepGraphs", "ladder"]

_log = logging.getLogger("hybridspec")


def ladder(most: int) -> list[int]:
    """Return the batch sizes to capture: few enough to start soon, close enough to waste little."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 513, 32)]
    return sorted({min(size, most) for size in sizes})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    lanes: Tensor
    outcome: Outcome
    step: Step


class StepGraphs:
    """Captured steps of one decoder.

    Attributes:
        decoder: what the steps work on; its pools and tables keep their addresses.
        sizes: batch sizes, rising.
        nbytes: memory that the graphs hold.
    """

    def __init__(
        self,
        decoder: Decoder,
        sizes: Sequence[int],
        *,
        asks: Asks,
        verify_rows: int | None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.decoder = decoder
        self.sizes = list(sizes)
        self.verify_rows = verify_rows
        self._asks = asks
        device = decoder.pools.device
        free = torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, _Captured] = {}
        # The largest first: the smaller ones find room in what it has left.
        for done, size in enumerate(sorted(sizes, reverse=True)):
            self._graphs[size] = self._capture(size, pool)
            if on_progress is not None:
                on_progress(done + 1, len(sizes))
        self.nbytes = free - torch.cuda.mem_get_info(device)[0]
        _log.info("graphs: %d sizes, %d MiB", len(sizes), self.nbytes >> 20)

    def size_for(self, num_requests: int) -> int | None:
        """Return the smallest captured size for a batch, None if there is none."""
        place = bisect_left(self.sizes, num_requests)
        return self.sizes[place] if place < len(self.sizes) else None

    def run(self, size: int, lanes: Tensor | None) -> Outcome:
        """Launch a step.

        Args:
            size: a captured size.
            lanes: slots of the batch in pinned memory, -1 behind them, [size] int32; None: the same
                as when this size ran last.

        Returns:
            What the step finds, in memory that the next launch of any size overwrites.
        """
        captured = self._graphs[size]
        if lanes is not None:
            captured.lanes.copy_(lanes, non_blocking=True)
        captured.graph.replay()
        return captured.outcome

    def num_rows(self, size: int) -> int:
        """Rows of a step of this size."""
        rows = size * (self.decoder.requests.most_drafts + 1)
        return rows if self.verify_rows is None else min(rows, max(self.verify_rows, size))

    def _capture(self, size: int, pool: Any) -> _Captured:
        decoder, device = self.decoder, self.decoder.pools.device
        num_rows = self.num_rows(size)
        lanes = torch.full((size,), -1, dtype=torch.int32, device=device)
        step = Step.create(
            max_requests=size,
            max_rows=num_rows,
            max_drafts=decoder.requests.most_drafts,
            device=device,
        )

        def run() -> Outcome:
            return decode_step(decoder, lanes, step, num_rows=num_rows, asks=self._asks)

        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()  # compiles and loads what is missing; with no live lane it changes nothing
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outcome = run()
        return _Captured(graph=graph, lanes=lanes, outcome=outcome, step=step)
