"""Random batches for the plan of a decode step, and the comparison of a backend with another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from hybridspec.ops.verify_plan import Step, cpu
from hybridspec.ops.verify_plan.call import Cursors, Drafts

__all__ = ["KINDS", "PlanCase", "differences", "random_case", "reference_plan", "run_plan"]

KINDS = ("uniform", "ties", "equal", "nan", "outside", "tiny", "ones")


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """Arguments of one `plan_step` call, and the size of its plan."""

    confidences: Tensor
    token_ids: Tensor
    slots: Tensor
    seq_len: Tensor
    history_len: Tensor
    ring_start: Tensor | None
    num_rows: int
    num_drafts: Tensor | None
    calibration: Tensor | None
    max_requests: int
    max_rows: int

    def to(self, device: str) -> PlanCase:
        """Return the case with its tensors on a device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def call(self) -> tuple[Drafts, Tensor, Tensor, Cursors, int]:
        """Return the arguments of a backend's `plan_step`, without the plan."""
        drafts = Drafts(self.confidences, self.num_drafts, self.calibration)
        cursors = Cursors(self.seq_len, self.history_len, self.ring_start, 16)
        return drafts, self.token_ids, self.slots, cursors, self.num_rows

    def new_plan(self) -> Step:
        """Return a plan of this case's size, filled with numbers that no result has."""
        plan = Step.create(
            max_requests=self.max_requests,
            max_rows=self.max_rows,
            max_drafts=self.token_ids.shape[1] - 1,
            device=self.slots.device,
        )
        for tensor in plan.tensors():
            tensor.fill_(77)
        return plan


def random_case(
    generator: torch.Generator,
    num_requests: int,
    num_drafts: int,
    *,
    kind: str | None = None,
    has_limits: bool = False,
    num_bins: int = 0,
    share_dead: float | None = None,
    num_rows: int | None = None,
    is_staggered: bool = True,
) -> PlanCase:
    """Draw a batch.

    Args:
        generator: source of all draws, on the CPU.
        num_requests: requests B, dead ones included.
        num_drafts: drafts k of each request.
        kind: one of KINDS, or None for any.
        has_limits: whether requests have their own numbers of drafts.
        num_bins: bins of the calibration table, 0 = none.
        share_dead: share of requests with slot -1, or None for any.
        num_rows: row budget, or None for any.
        is_staggered: whether windows that begin at ring row 0, half of all, fold early.
    """

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def pick(options: tuple):
        return options[int(draw(0, len(options)))]

    kind = kind or pick(KINDS)
    confidences = torch.rand(num_requests, num_drafts, generator=generator)
    if kind == "ties":
        confidences = (confidences * 3).floor() / 2
    elif kind == "equal":
        confidences = torch.full_like(confidences, 0.5)
    elif kind == "nan":
        confidences[confidences < 0.3] = torch.nan
    elif kind == "outside":
        confidences = confidences * 3 - 1
    elif kind == "tiny":
        confidences = confidences**40
    elif kind == "ones":
        confidences = torch.ones_like(confidences)
    share_dead = pick((0.0, 0.0, 0.3, 1.0)) if share_dead is None else share_dead
    num_slots = num_requests + 3
    slots = torch.randperm(num_slots, generator=generator)[:num_requests].to(torch.int32)
    slots[torch.rand(num_requests, generator=generator) < share_dead] = -1
    most_rows = num_requests * (num_drafts + 1)
    if num_rows is None:
        num_rows = int(draw(num_requests, most_rows + 1))
    max_requests = num_requests + pick((0, 0, 5))
    return PlanCase(
        confidences=confidences,
        token_ids=draw(0, 100_000, num_requests, num_drafts + 1),
        slots=slots,
        seq_len=draw(0, 100_000, num_slots).to(torch.int32),
        history_len=draw(0, 17, num_slots).to(torch.int32),
        ring_start=draw(0, 2, num_slots).to(torch.int32) if is_staggered else None,
        num_rows=num_rows,
        num_drafts=draw(0, num_drafts + 2, num_requests).to(torch.int32) if has_limits else None,
        calibration=torch.rand(num_drafts, num_bins, generator=generator) if num_bins else None,
        max_requests=max_requests,
        max_rows=max(num_rows + pick((0, 0, 1, 30)), max_requests),
    )


def run_plan(case: PlanCase, step: Callable[..., None], **options: object) -> Step:
    """Call a backend's `plan_step` on a plan of its own."""
    plan = case.new_plan()
    step(*case.call(), plan, **options)
    return plan


def reference_plan(case: PlanCase) -> Step:
    """The plan that the reference makes."""
    return run_plan(case, cpu.plan_step)


def differences(plan: Step, expected: Step) -> Tensor:
    """Number of entries that differ, all tensors but the scratch, without a host sync."""
    pairs = list(zip(plan.tensors(), expected.tensors(), strict=True))[:-1]
    return torch.stack([(mine != theirs).sum() for mine, theirs in pairs]).sum()
