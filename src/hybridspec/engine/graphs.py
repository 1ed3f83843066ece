"""Decode steps as CUDA graphs: verifying by requests and rows, proposing by requests and drafts.

A graph of each kind makes a step, so the numbers of rows and of drafts are chosen apart. They hold
every option of choosing tokens: what a batch needs stands in its slots' columns. Lanes that a batch
does not fill are slot -1. All graphs share one memory pool, since no two run at the same time; what
one leaves for the next, or for the host, lies outside it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridspec.engine import capture
from hybridspec.ops.accept import StepResult
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import Allocator
from hybridspec.speculate import Asks, Decoder, Outcome, StepPlan, verify_step

__all__ = ["StepGraphs", "ladder"]

_log = logging.getLogger("hybridspec")


def ladder(most: int) -> list[int]:
    """Return the batch sizes to capture: few enough to start soon, close enough to waste little."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 513, 32)]
    return sorted({min(size, most) for size in sizes})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lanes:
    """The batch of all graphs of one size, and what verifying leaves.

    Attributes:
        lanes: slots of the batch, -1 = padding, [B] int32.
        slots: the same without the padding, as the host knows them.
        live: `lanes` with -1 where a request had no rows, [B] int32.
        hidden: what the drafter made of each request's last committed row, [B, D].
        packed: as `StepResult` has it, [B, ...] int32.
        confidences: as `Outcome` has them, [B, k] fp32.
    """

    lanes: Tensor
    slots: list[int] = field(default_factory=list)
    live: Tensor
    hidden: Tensor
    packed: Tensor
    confidences: Tensor


class StepGraphs:
    """Captured steps of one decoder.

    Args:
        decoder: what the steps work on; its pools and tables keep their addresses.
        allocator: brings the lanes to the device, with what is new in the page table.
        sizes: numbers of rows, rising, by batch size.
        drafts: numbers of drafts to propose.
        asks: what requests may need.

    Attributes:
        sizes: batch sizes, rising.
        budgets: numbers of rows, rising, by batch size.
        drafts: numbers of drafts, rising.
        nbytes: memory that the graphs hold.
    """

    def __init__(
        self,
        decoder: Decoder,
        allocator: Allocator,
        sizes: Mapping[int, Sequence[int]],
        *,
        drafts: Sequence[int],
        asks: Asks,
    ) -> None:
        self.decoder = decoder
        self.allocator = allocator
        self.sizes = sorted(sizes)
        self.budgets = {size: list(sizes[size]) for size in self.sizes}
        self.drafts = sorted(drafts)
        self._asks = asks
        device = decoder.pools.device
        self._lanes = {size: _make_lanes(decoder, size) for size in self.sizes}
        free, pool = capture.free_bytes(device), capture.memory_pool(device)
        self._verify: dict[tuple[int, int], capture.Replayed] = {}
        self._draft: dict[tuple[int, int], capture.Replayed] = {}
        # The largest first: the smaller ones find room in what it has left.
        for size in reversed(self.sizes):
            for rows in reversed(self.budgets[size]):
                self._verify[size, rows] = self._capture_verify(size, rows, pool)
            if decoder.requests.most_drafts:
                for count in reversed(self.drafts):
                    self._draft[size, count] = self._capture_draft(size, count, pool)
        self.nbytes = free - capture.free_bytes(device)
        count = len(self._verify) + len(self._draft)
        _log.info("graphs: %d, %d MiB", count, self.nbytes >> 20)

    def run(self, slots: Sequence[int], asks: Asks, plan: StepPlan) -> Outcome | None:
        """Launch a step of a batch.

        Args:
            slots: slots of the batch.
            asks: what its requests need.
            plan: how many rows and drafts; the smallest captured number of rows that holds them is
                taken, or the largest there is.

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
        size = self.sizes[place]
        budgets = self.budgets[size]
        self.set_slots(size, slots)
        self.verify(size, budgets[min(bisect_left(budgets, plan.rows), len(budgets) - 1)])
        self.draft(size, plan.drafts)
        left = self._lanes[size]
        return Outcome(
            result=StepResult(left.packed, left.packed[:, 0]),
            confidences=None if self.decoder.calibration is None else left.confidences,
        )

    def set_slots(self, size: int, slots: Sequence[int]) -> None:
        """Let the graphs of a size work on these slots; uploaded only if they are others.

        What is new in the page table comes along.
        """
        lanes = self._lanes[size]
        if lanes.slots != list(slots):
            lanes.slots[:] = slots
            lanes.lanes.copy_(self.allocator.upload([*slots, *[-1] * (size - len(slots))]))
        elif self.allocator.has_grown:
            self.allocator.upload(())

    def verify(self, size: int, rows: int) -> None:
        """Launch all of a step but the next drafts."""
        self._verify[size, rows].replay()

    def draft(self, size: int, count: int) -> None:
        """Launch proposing so many drafts, for the requests that the last `verify` had."""
        if self._draft:
            self._draft[size, count].replay()

    def _capture_verify(self, size: int, rows: int, pool: Any) -> capture.Replayed:
        decoder, left, asks = self.decoder, self._lanes[size], self._asks
        step = Step.create(
            max_requests=size,
            max_rows=rows,
            max_drafts=decoder.requests.most_drafts,
            device=decoder.pools.device,
        )

        def run() -> None:
            outcome, hidden, live = verify_step(decoder, left.lanes, step, num_rows=rows, asks=asks)
            left.packed.copy_(outcome.result.packed)
            if outcome.confidences is not None:
                left.confidences.copy_(outcome.confidences)
            if decoder.requests.most_drafts:
                left.hidden.copy_(hidden)
                left.live.copy_(live)

        return capture.record(run, pool, decoder.pools.device)

    def _capture_draft(self, size: int, count: int, pool: Any) -> capture.Replayed:
        decoder, left, asks = self.decoder, self._lanes[size], self._asks

        def run() -> None:
            decoder.drafter.propose(decoder, left.hidden, left.live, asks, count)

        return capture.record(run, pool, decoder.pools.device)


def _make_lanes(decoder: Decoder, size: int) -> _Lanes:
    device, k = decoder.pools.device, decoder.requests.most_drafts

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return _Lanes(
        lanes=zeros(size) - 1,
        live=zeros(size) - 1,
        hidden=zeros(size, decoder.model.config.hidden_size, dtype=decoder.model.dtype),
        packed=zeros(size, StepResult.width(k)),
        confidences=zeros(size, k, dtype=torch.float32),
    )
