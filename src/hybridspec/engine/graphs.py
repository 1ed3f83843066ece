"""Decode steps as CUDA graphs, one for each size of a ladder.

A graph holds the whole step, target and drafter, with every option of choosing tokens: what a batch
needs stands in its slots' columns. Lanes that a batch does not fill are slot -1. All graphs share
one memory pool, since no two run at the same time and what one leaves is copied before the next.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import Allocator
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
    slots: list[int]  # what the lanes hold, without the padding
    outcome: Outcome
    step: Step


class StepGraphs:
    """Captured steps of one decoder.

    Attributes:
        decoder: what the steps work on; its pools and tables keep their addresses.
        allocator: brings the lanes to the device, with what is new in the page table.
        sizes: batch sizes, rising.
        nbytes: memory that the graphs hold.
    """

    def __init__(
        self,
        decoder: Decoder,
        allocator: Allocator,
        sizes: Sequence[int],
        *,
        asks: Asks,
        verify_rows: int | None,
    ) -> None:
        self.decoder = decoder
        self.allocator = allocator
        self.sizes = list(sizes)
        self.verify_rows = verify_rows
        device = decoder.pools.device
        free = torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, _Captured] = {}
        # The largest first: the smaller ones find room in what it has left.
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = self._capture(size, pool, asks)
        self.nbytes = free - torch.cuda.mem_get_info(device)[0]
        _log.info("graphs: %d sizes, %d MiB", len(sizes), self.nbytes >> 20)

    def run(self, slots: Sequence[int], asks: Asks) -> Outcome | None:
        """Launch a step of a batch.

        Args:
            slots: slots of the batch.
            asks: what its requests need.

        Returns:
            What the step finds, in memory that the next launch overwrites; rows behind those of
            `slots` are empty. None if no graph serves the batch: it is larger than the ladder, or
            needs the host (options that exceed their pool) or a report of log-probabilities.
        """
        if asks.overflow is not None or asks.num_logprobs is not None:
            return None
        place = bisect_left(self.sizes, len(slots))
        if place == len(self.sizes):
            return None
        captured = self._graphs[self.sizes[place]]
        if captured.slots != list(slots):
            captured.slots[:] = slots
            padded = [*slots, *[-1] * (self.sizes[place] - len(slots))]
            captured.lanes.copy_(self.allocator.upload(padded))
        elif self.allocator.has_grown:
            self.allocator.upload(())
        captured.graph.replay()
        return captured.outcome

    def _capture(self, size: int, pool: Any, asks: Asks) -> _Captured:
        decoder, device = self.decoder, self.decoder.pools.device
        num_rows = decoder.most_rows(size, self.verify_rows)
        lanes = torch.full((size,), -1, dtype=torch.int32, device=device)
        step = Step.create(
            max_requests=size,
            max_rows=num_rows,
            max_drafts=decoder.requests.most_drafts,
            device=device,
        )

        def run() -> Outcome:
            return decode_step(decoder, lanes, step, num_rows=num_rows, asks=asks)

        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()  # compiles and loads what is missing; with no live lane it changes nothing
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outcome = run()
        return _Captured(graph=graph, lanes=lanes, slots=[], outcome=outcome, step=step)
