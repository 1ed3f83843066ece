"""A step between its launch and the moment when the host has read its result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec.engine.request import Request
from hybridspec.ops.accept import StepResult
from hybridspec.speculate import LogprobReport, Outcome, StepPlan

__all__ = ["Launch"]


@dataclass(slots=True, kw_only=True)
class Launch:
    """A step whose outcome the host has not read yet.

    Attributes:
        requests: the batch.
        turn: of the engine, in which it was launched.
        admissions: of each request when the step was launched; a slot may be another's since.
        outcome: what the step found; of a device, its copy in host memory.
        plan: sizes of the step; None where these are first tokens.
        started: when it was launched.
        begun: when it began to run, as an event of its device or by the clock of the CPU's thread,
            which other processes do not hold up.
        copied: set on a device once the outcome lies in host memory.
    """

    requests: Sequence[Request]
    turn: int
    admissions: Sequence[int]
    outcome: Outcome
    plan: StepPlan | None
    started: float
    begun: torch.cuda.Event | float | None = None
    copied: torch.cuda.Event | None = None

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        outcome: Outcome,
        started: float,
        *,
        turn: int,
        plan: StepPlan | None = None,
        begun: torch.cuda.Event | float | None = None,
    ) -> Launch:
        """Note a step and begin to copy its outcome to the host."""
        copied = None
        if outcome.result.packed.is_cuda:
            outcome = _copied_to_host(outcome)
            copied = torch.cuda.Event(enable_timing=True)
            copied.record()
        return cls(
            requests=requests,
            turn=turn,
            admissions=[request.admission for request in requests],
            outcome=outcome,
            plan=plan,
            started=started,
            begun=begun,
            copied=copied,
        )

    def wait(self) -> float:
        """Wait for the outcome; return the step's seconds where it ran."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.begun is None:
            return time.perf_counter() - self.started
        if isinstance(self.begun, float):
            return time.thread_time() - self.begun
        assert self.copied is not None
        milliseconds: float = self.begun.elapsed_time(self.copied)
        return 1e-3 * milliseconds


def _copied_to_host(outcome: Outcome) -> Outcome:
    """Begin to copy an outcome into pinned memory."""
    result, report, confidences = outcome.result, outcome.report, outcome.confidences
    packed, width = result.packed, result.packed.shape[1]
    if confidences is not None:  # as integers beside the others: one copy
        packed = torch.cat([packed, confidences.view(torch.int32)], 1)
    packed = _start_copy(packed)
    if confidences is not None:
        packed, confidences = packed[:, :width], packed[:, width:].view(torch.float32)
    return Outcome(
        result=StepResult(packed, packed[:, 0]),
        report=None if report is None else LogprobReport(_start_copy(report.packed)),
        confidences=confidences,
    )


def _start_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
