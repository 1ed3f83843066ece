"""How many rows a step verifies, and how many drafts it proposes for the next one.

A draft costs twice: to propose, and to verify. At low load verifying is nearly free, since a step
reads all weights for one row or for many; at high load each row costs, and so does a wrong draft.
The choice is argmax of expected tokens per second over the sizes that steps can have, no drafts
among them. It never changes what is generated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from hybridspec.speculate.acceptance import AcceptanceModel
from hybridspec.speculate.costs import Costs

__all__ = ["DynamicPolicy", "FixedPolicy", "Policy", "PolicyReport", "StepPlan", "StepSeen"]

EXPLORED = 0.005  # share of the time that may go into looking at what else there is
_PROBED = 32  # proposals that one look takes at least
_LEAST_LOSS = 0.02  # of a step, for each step of a look, however promising it seems
_REFRESHED = 64  # proposals between two looks at the newest ones, and 8 steps at least


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Sizes of one step.

    Attributes:
        num_requests: requests that the step is for.
        rows: most rows that it verifies.
        drafts: drafts that it proposes for each request, at its end.
        depth: drafts that the step before it proposed.
        expected_tokens: tokens that it should commit over all requests; None: not estimated.
        expected_s: seconds that it should take.
        is_probe: whether it is there to find out.
        is_captured: whether it has the sizes of a captured step, so that its time tells of them.
    """

    num_requests: int
    rows: int
    drafts: int
    depth: int
    expected_tokens: float | None = None
    expected_s: float | None = None
    is_probe: bool = False
    is_captured: bool = True

    @property
    def expected_per_request(self) -> float | None:
        """Tokens that a request should commit; None: not estimated."""
        tokens = self.expected_tokens
        return None if tokens is None else tokens / self.num_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """What a step did, as the host learns it.

    Attributes:
        committed: tokens over all requests.
        seconds: how long the step took; None where that tells nothing of its sizes.
        outcomes: of each request, tokens committed, drafts that were right, and rows, 0 where it
            had none, [B, 3] int32 on the CPU.
        confidences: of the drafts that each request had, 0 where it had none, [B, k] fp32 on the
            CPU; None unless requested.
    """

    committed: int
    seconds: float | None
    outcomes: Tensor
    confidences: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class PolicyReport:
    """What a policy expected and what happened, over all steps so far.

    Attributes:
        steps: decode steps.
        probes: those that were there to find out.
        rows: most rows that they might verify.
        by_drafts: how many steps proposed how many drafts.
        committed, expected_tokens: tokens.
        seconds, expected_s: time.
        acceptance: by position, of the newest drafts; None where none were verified.
    """

    steps: int = 0
    probes: int = 0
    rows: int = 0
    by_drafts: dict[int, int] = field(default_factory=dict)
    committed: int = 0
    expected_tokens: float = 0.0
    seconds: float = 0.0
    expected_s: float = 0.0
    acceptance: Sequence[float | None] = ()

    def add(self, plan: StepPlan, seen: StepSeen) -> None:
        """Count a step."""
        self.steps += 1
        self.probes += plan.is_probe
        self.rows += plan.rows
        self.by_drafts[plan.drafts] = self.by_drafts.get(plan.drafts, 0) + 1
        self.committed += seen.committed
        self.expected_tokens += plan.expected_tokens or 0.0
        if seen.seconds is not None and plan.expected_s is not None:
            self.seconds += seen.seconds
            self.expected_s += plan.expected_s


class Policy(Protocol):
    """Chooses the sizes of steps; one call of `choose` for each step that is launched."""

    report: PolicyReport

    @property
    def drafts(self) -> int:
        """Drafts that are proposed for each request now."""
        ...

    def choose(self, num_requests: int) -> StepPlan:
        """Return the sizes of the next step, of so many requests."""
        ...

    def note(self, plan: StepPlan, seen: StepSeen) -> None:
        """Take in what a step did.

        Args:
            plan: of `choose`.
            seen: what it did.
        """
        ...


class FixedPolicy:
    """The same number of drafts whatever happens.

    Args:
        drafts: for each request.
        verify_rows: most rows of a step; None: room for all drafts.
    """

    def __init__(self, drafts: int, verify_rows: int | None = None) -> None:
        self.drafts = drafts
        self.verify_rows = verify_rows
        self.report = PolicyReport()

    def choose(self, num_requests: int) -> StepPlan:
        """Return the sizes of the next step; see `Policy`."""
        rows = num_requests * (self.drafts + 1)
        if self.verify_rows is not None:
            rows = min(rows, max(self.verify_rows, num_requests))
        return StepPlan(num_requests=num_requests, rows=rows, drafts=self.drafts, depth=self.drafts)

    def note(self, plan: StepPlan, seen: StepSeen) -> None:
        """Count the step; see `Policy`."""
        self.report.add(plan, seen)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Sizes that steps would keep, and what each of them would bring."""

    rows: int
    drafts: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class DynamicPolicy:
    """The sizes that promise most tokens per second, from what steps cost and how drafts fare.

    Now and then a few steps propose all drafts and verify more than pays, so that what is not
    tried at present stays known: a look is taken when 0.5 % of the time since the last one covers
    what it is expected to lose.

    Args:
        num_drafts: most drafts k of one request.
        costs: what steps take.
        verify_rows: most rows of a step; None: as many as `costs` has.

    Attributes:
        costs: see above.
        acceptance: what is known of drafts.
        table: of `AcceptanceModel`, as it was when the newest proposals were looked at.
        report: what was expected and what happened.
        drafts: that the newest step proposes for each request; a prompt's end does as well.
    """

    def __init__(self, num_drafts: int, costs: Costs, verify_rows: int | None = None) -> None:
        self.num_drafts = num_drafts
        self.costs = costs
        self.verify_rows = verify_rows
        self.acceptance = AcceptanceModel(num_drafts)
        self.table = self.acceptance.table()
        self.report = PolicyReport()
        self.drafts = num_drafts
        self._best: dict[int, _Choice] = {}
        self._budgets: dict[int, Sequence[int]] = {}
        self._saved = 0.0  # seconds that looks may take
        self._looking = 0  # steps that the present look still takes
        self._varied = 0  # steps whose sizes were there to differ
        self._num_noted = self._steps_noted = 0
        self._has_news = True

    def choose(self, num_requests: int) -> StepPlan:
        """Return the sizes of the next step; see `Policy`."""
        best = self._best.get(num_requests)
        if best is None:
            best = self._best[num_requests] = self._find_best(num_requests)
        rows, drafts = best.rows, best.drafts
        self._saved += EXPLORED * best.seconds
        wider = self._wider(num_requests, best)
        if wider is not None and self._starts(num_requests, best, wider):
            self._looking = math.ceil(_PROBED / num_requests) + 1
        is_probe = self._looking > 0 and wider is not None
        if is_probe and wider is not None:
            # The last step of a look proposes what it would anyway, and verifies what is there.
            rows, drafts = wider.rows, wider.drafts if self._looking > 1 else drafts
        self._looking = max(self._looking - 1, 0)
        is_vague = self.costs.is_vague
        if is_vague:
            # Many rows and drafts, many rows alone, drafts alone: what each of them costs.
            self._varied += 1
            rows, drafts = num_requests * (1 + self.num_drafts), self.num_drafts
            drafts, is_probe = 0 if self._varied % 3 == 0 else drafts, True
        depth, self.drafts = self.drafts, drafts
        rows = self._needed(num_requests, rows, depth)
        return StepPlan(
            num_requests=num_requests,
            rows=rows,
            drafts=drafts,
            depth=depth,
            expected_tokens=self._tokens(num_requests, rows, depth),
            expected_s=None if is_vague else self.costs.seconds(num_requests, rows, drafts),
            is_probe=is_probe,
        )

    def note(self, plan: StepPlan, seen: StepSeen) -> None:
        """Learn from a step; see `Policy`."""
        if seen.seconds is not None:
            self.costs.note(plan.num_requests, plan.rows, plan.drafts, seen.seconds)
        self.report.add(plan, seen)
        if seen.confidences is not None:
            has_rows = seen.outcomes[:, 2] > 0
            _, num_accepted, num_rows = seen.outcomes[has_rows].long().unbind(1)
            self.acceptance.note(plan.depth, seen.confidences[has_rows], num_rows - 1, num_accepted)
            self._num_noted += len(num_rows) if plan.depth else 0
        self._steps_noted += 1
        is_news = self._num_noted >= _REFRESHED and self._steps_noted >= 8
        if is_news or self._steps_noted >= _REFRESHED:
            self._num_noted = self._steps_noted = 0
            self.table = self.acceptance.table()
            self.acceptance.refresh(self.table, plan.num_requests)
            self.report.acceptance = self.acceptance.by_position
            self._best.clear()
            self._has_news = True

    def has_news(self) -> bool:
        """Return whether `table` has changed since the last call."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def budgets(self, num_requests: int) -> Sequence[int]:
        """Return the numbers of rows that a step may verify, within `verify_rows`."""
        if num_requests not in self._budgets:
            found = self.costs.budgets(num_requests)
            if self.verify_rows is not None:
                found = [rows for rows in found if rows <= self.verify_rows] or found[:1]
            self._budgets[num_requests] = found
        return self._budgets[num_requests]

    def _tokens(self, num_requests: int, rows: int, depth: int) -> float:
        """Estimate what a step commits."""
        quota = (rows - num_requests) / num_requests
        return num_requests * (1 + self.acceptance.expected(num_requests, depth, quota))

    def _choice(self, num_requests: int, rows: int, drafts: int) -> _Choice:
        return _Choice(
            rows=rows,
            drafts=drafts,
            tokens=self._tokens(num_requests, rows, drafts),
            seconds=self.costs.seconds(num_requests, rows, drafts),
        )

    def _find_best(self, num_requests: int) -> _Choice:
        """Return the sizes that bring most tokens per second if all steps have them."""
        choices = [
            self._choice(num_requests, rows, drafts)
            for drafts in range(self.num_drafts + 1)
            for rows in self.budgets(num_requests)
            if rows == self._needed(num_requests, rows, drafts)
        ]
        return max(choices, key=lambda choice: choice.rate)

    def _needed(self, num_requests: int, rows: int, depth: int) -> int:
        """Return the least budget that serves as many rows as this one, given so many drafts."""
        most = min(rows, num_requests * (1 + depth))
        budgets = self.budgets(num_requests)
        return next((one for one in budgets if one >= most), budgets[-1])

    def _wider(self, num_requests: int, best: _Choice) -> _Choice | None:
        """Return sizes that show more than the best ones do; None if these show everything."""
        more = [rows for rows in self.budgets(num_requests) if rows > best.rows]
        if best.drafts == self.num_drafts and not more:
            return None
        rows = more[0] if more else best.rows
        return self._choice(num_requests, rows, self.num_drafts)

    def _starts(self, num_requests: int, best: _Choice, wider: _Choice) -> bool:
        """Return whether an exploration may begin, and pay for it."""
        if self._looking > 0:
            return False
        lost = max(wider.seconds - wider.tokens / best.rate, _LEAST_LOSS * best.seconds)
        price = lost * (math.ceil(_PROBED / num_requests) + 1)
        self._saved = min(self._saved, 2 * price)
        if self._saved < price:
            return False
        self._saved -= price
        self.acceptance.forget()  # else few looks would say nothing against many steps long ago
        return True
