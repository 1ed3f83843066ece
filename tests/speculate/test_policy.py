"""The policy that sizes steps: what it learns, what it picks, and that it is never trapped."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
import torch

from helpers.thinned import thinned
from hybridspec.speculate import (
    AcceptanceModel,
    CostTable,
    DynamicPolicy,
    FixedPolicy,
    LearntCosts,
    Policy,
    StepPlan,
    StepSeen,
    row_budgets,
)

K = 3
SIZES = (1, 4, 32, 256)


def table(row_s: float, pass_s: float, base_s: float = 5e-3, free_rows: int = 128) -> CostTable:
    """Steps whose first rows cost nothing."""
    return CostTable(
        verify={
            size: {rows: base_s + row_s * max(rows - free_rows, 0) for rows in row_budgets(size, K)}
            for size in SIZES
        },
        draft={size: [count * pass_s for count in range(K + 1)] for size in SIZES},
    )


def seen(outcomes: list[tuple[int, int, int]], sure: list[list[float]], seconds: float) -> StepSeen:
    """What a step did: of each request tokens, right drafts and rows."""
    return StepSeen(
        committed=sum(committed for committed, *_ in outcomes),
        seconds=seconds,
        outcomes=torch.tensor(outcomes, dtype=torch.int32),
        confidences=torch.tensor(sure),
    )


H200_LIKE = {"row_s": 25e-6, "pass_s": 3e-4}


@dataclass
class World:
    """Requests whose drafts stand with a probability that the drafter knows, or does not."""

    rates: tuple[float, ...]
    confidence: float | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    plans: list[StepPlan] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    unread: deque = field(default_factory=deque)

    def run(self, policy: Policy, costs: CostTable, num_requests: int, steps: int) -> None:
        """Run steps; the policy learns of each when the next one has been launched."""
        for _ in range(steps):
            plan = policy.choose(num_requests)
            self.plans.append(plan)
            each = (plan.rows - num_requests) // num_requests
            extra = (plan.rows - num_requests) % num_requests
            outcomes, sure = [], []
            for b in range(num_requests):
                known = [self.confidence or rate for rate in self.rates]
                sure.append([*known[: plan.depth], *[0.0] * (K - plan.depth)])
                verified = min(each + (b < extra), plan.depth)
                stands = [self.rng.random() < rate for rate in self.rates[:verified]]
                accepted = len(list(itertools.takewhile(bool, stands)))
                outcomes.append((accepted + 1, accepted, verified + 1))
            seconds = costs.seconds(num_requests, plan.rows, plan.drafts)
            self.tokens += sum(committed for committed, *_ in outcomes)
            self.seconds += seconds
            self.unread.append((plan, seen(outcomes, sure, seconds)))
            if len(self.unread) > 1:
                policy.note(*self.unread.popleft())

    def usual(self, last: int) -> tuple[int, int]:
        """Rows and drafts of most of the last steps."""
        pairs = [(plan.rows, plan.drafts) for plan in self.plans[-last:]]
        return max(set(pairs), key=pairs.count)


def rate_of(policy: Policy, rates: tuple[float, ...], num_requests: int) -> float:
    world = World(rates)
    world.run(policy, table(**H200_LIKE), num_requests, max(300, 6000 // num_requests))
    return world.tokens / world.seconds


@pytest.mark.parametrize(
    ("rates", "num_requests"),
    thinned([(0.9, 0.85, 0.8), (0.02, 0.02, 0.02), (0.5, 0.4, 0.3)], [1, 256, 4, 32]),
)
def test_close_to_the_best_fixed_number(num_requests: int, rates: tuple[float, ...]) -> None:
    """What looking around and one step's delay cost is little."""
    policy = DynamicPolicy(K, table(**H200_LIKE))
    dynamic = rate_of(policy, rates, num_requests)
    fixed = [rate_of(FixedPolicy(k), rates, num_requests) for k in range(K + 1)]
    assert dynamic > 0.97 * max(fixed)
    assert policy.report.committed > 0


def test_it_picks_what_pays() -> None:
    costs = table(**H200_LIKE)
    for rates, num_requests, expected in (
        ((0.9, 0.9, 0.9), 1, (4, 3)),
        ((0.01, 0.01, 0.01), 1, (1, 0)),
        ((0.9, 0.9, 0.9), 256, (512, 1)),
        ((1.0, 1.0, 1.0), 256, (1024, 3)),
        ((0.9, 0.05, 0.05), 256, (512, 1)),
        ((0.2, 0.2, 0.2), 256, (256, 0)),
    ):
        world = World(rates)
        world.run(DynamicPolicy(K, table(**H200_LIKE)), costs, num_requests, 300)
        assert world.usual(100) == expected, rates


def test_confidences_that_tell_choose_rows_between() -> None:
    """Half of the requests' drafts stand and half do not: rows for the first half are verified."""
    policy = DynamicPolicy(K, table(row_s=25e-6, pass_s=1e-5))
    for _ in range(40):
        plan = policy.choose(256)
        sure = [[0.97 if b % 2 else 0.03] * K for b in range(256)]
        rows = plan.depth + 1
        outcomes = [(rows, plan.depth, rows) if b % 2 else (1, 0, rows) for b in range(256)]
        seconds = policy.costs.seconds(256, plan.rows, plan.drafts)
        policy.note(plan, seen(outcomes, sure, seconds))
    plans = {policy.choose(256).rows for _ in range(3)}
    assert plans == {640}  # one row each, and three drafts of 128 requests


@pytest.mark.parametrize("num_requests", [1, 256])
def test_no_drafts_are_left_again(num_requests: int) -> None:
    """Acceptance falls to nothing and comes back; so do drafts."""
    sizes = {"row_s": 10e-6, "pass_s": 3e-4}
    costs = table(**sizes)
    policy, world = DynamicPolicy(K, table(**sizes)), World((0.0, 0.0, 0.0), confidence=0.5)
    world.run(policy, costs, num_requests, max(8000 // num_requests, 200))
    assert world.usual(100) == (num_requests, 0)
    world.rates, before = (0.95, 0.95, 0.95), world.seconds
    while world.usual(20)[1] < K and world.seconds < before + 30:
        world.run(policy, costs, num_requests, 20)
    assert world.seconds < before + 20


def test_when_load_falls_drafts_return_at_once() -> None:
    costs = table(**H200_LIKE)
    policy, world = DynamicPolicy(K, table(**H200_LIKE)), World((0.35, 0.3, 0.3))
    world.run(policy, costs, 256, 200)
    assert world.usual(100) == (256, 0)
    world.run(policy, costs, 1, 10)
    assert world.plans[-8].drafts > 0


def test_a_short_proposal_does_not_stay_short() -> None:
    """Only the first draft stood; then all do."""
    costs = table(**H200_LIKE)
    policy, world = DynamicPolicy(K, table(**H200_LIKE)), World((0.9, 0.0, 0.0), confidence=0.5)
    world.run(policy, costs, 4, 300)
    assert world.usual(100)[1] == 1
    world.rates = (0.9, 0.9, 0.9)
    world.run(policy, costs, 4, 2500)
    assert world.usual(100) == (16, 3)


def test_looking_around_costs_what_it_may() -> None:
    """Drafts never pay; what is lost stays near half a percent of the time."""
    costs = table(**H200_LIKE)
    policy, world = DynamicPolicy(K, table(**H200_LIKE)), World((0.0, 0.0, 0.0))
    world.run(policy, costs, 256, 100)  # learns that first
    world.tokens, world.seconds = 0, 0.0
    world.run(policy, costs, 256, 1000)
    plain = 256 / costs.seconds(256, 256, 0)
    assert 0 < policy.report.probes < 200
    assert world.tokens / world.seconds > 0.985 * plain


def test_rows_are_no_more_than_there_are_drafts_for() -> None:
    world = World((0.9, 0.6, 0.3))
    world.run(DynamicPolicy(K, table(**H200_LIKE)), table(**H200_LIKE), 32, 300)
    depth = K
    for plan in world.plans:
        assert plan.depth == depth
        assert plan.rows <= row_budgets(32, K)[-1]
        smaller = [rows for rows in row_budgets(32, K) if rows < plan.rows]
        assert not smaller or smaller[-1] < 32 * (1 + plan.depth)
        depth = plan.drafts


def test_a_budget_of_rows_holds() -> None:
    policy, world = DynamicPolicy(K, table(**H200_LIKE), verify_rows=300), World((0.9, 0.9, 0.9))
    world.run(policy, table(**H200_LIKE), 256, 100)
    assert {plan.rows for plan in world.plans} == {256}
    assert FixedPolicy(K, 300).choose(256).rows == 300
    assert FixedPolicy(K, 8).choose(20).rows == 20
    assert FixedPolicy(K).choose(2).rows == 8


def test_what_is_expected_is_what_happens() -> None:
    policy = DynamicPolicy(K, table(**H200_LIKE))
    world = World((0.85, 0.7, 0.55))
    world.run(policy, table(**H200_LIKE), 32, 1500)
    report = policy.report
    assert report.expected_tokens == pytest.approx(report.committed, rel=0.03)
    assert report.expected_s == pytest.approx(report.seconds, rel=0.01)
    assert list(report.acceptance) == pytest.approx(world.rates, abs=0.06)
    assert sum(report.by_drafts.values()) == report.steps == 1499


def test_calibration_corrects_a_drafter_that_is_too_sure() -> None:
    model, draws = AcceptanceModel(2), torch.Generator().manual_seed(3)
    for _ in range(12):
        sure = torch.rand(256, 2, generator=draws)
        accepted = (torch.rand(256, generator=draws) < sure[:, 0] / 2).int()
        model.note(2, sure, torch.ones_like(accepted), accepted)
    found = model.table()
    for place in (4, 12, 20, 28):
        assert float(found[0, place]) == pytest.approx((place + 0.5) / 64, abs=0.12)
    assert model.by_position[1] is None


def test_expected_drafts_against_counting() -> None:
    """The best of a small group are verified within it, not within other steps' groups."""
    model, rng = AcceptanceModel(2), random.Random(4)
    lines = [[rng.random(), rng.random()] for _ in range(64)]
    none = torch.zeros(64, dtype=torch.int64)
    model.note(2, torch.tensor(lines), none, none)
    exact = ((torch.arange(32) + 0.5) / 32).expand(2, 32)
    model.refresh(exact, 2)

    def centre(one: float) -> float:
        return (int(one * 32) + 0.5) / 32

    scores = [[centre(a), centre(a) * centre(b)] for a, b in lines]
    for wanted in range(5):
        total = 0.0
        for first in range(0, 64, 2):
            total += sum(sorted(sum(scores[first : first + 2], []), reverse=True)[:wanted])
        assert model.expected(2, 2, wanted / 2) == pytest.approx(total / 64)
    best = sorted((score for line in scores for score in line), reverse=True)
    assert model.expected(64, 2, 0.5) == pytest.approx(sum(best[:32]) / 64)
    assert model.expected(64, 1, 1.0) == pytest.approx(sum(line[0] for line in scores) / 64)


def test_a_staircase_is_looked_up_and_followed() -> None:
    costs = table(**H200_LIKE)
    assert costs.budgets(3) == row_budgets(4, K)
    before = costs.seconds(200, 256, 0)
    assert before == pytest.approx(5e-3 + 128 * 25e-6)
    for _ in range(200):
        costs.note(200, 256, 0, before + 2e-3)
    assert costs.seconds(200, 256, 0) == pytest.approx(before + 2e-3, rel=1e-3)
    assert costs.seconds(100, 256, 0) == pytest.approx(before + 1e-3, rel=1e-2)
    costs.note(200, 256, 0, 60.0)  # something else held it up
    assert costs.seconds(200, 256, 0) < 1.2 * (before + 2e-3)


def test_costs_are_learnt_from_steps() -> None:
    costs = LearntCosts(K)

    def true(count: int, rows: int, drafts: int) -> float:
        return 0.004 + 0.0004 * rows + 0.0008 * drafts + 0.0001 * count * drafts

    rng = random.Random(5)
    costs.note(1, 1, 0, 3.0)  # the first steps compile
    costs.note(1, 1, 0, 1.0)
    for _ in range(400):
        count, drafts = rng.choice([1, 4, 12]), rng.randrange(K + 1)
        rows = count * rng.randrange(1, K + 2)
        costs.note(count, rows, drafts, true(count, rows, drafts) * rng.uniform(0.95, 1.05))
    for size in ((1, 1, 0), (1, 4, 3), (12, 48, 3), (12, 12, 1)):
        assert costs.seconds(*size) == pytest.approx(true(*size), rel=0.1)


@pytest.mark.parametrize("count", [1, 3, 8, 56, 64, 250])
@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_row_budgets(count: int, k: int) -> None:
    """From one row each to all of them; few enough to capture."""
    found = row_budgets(count, k)
    assert found[0] == count and found[-1] == count * (k + 1)
    assert found == sorted(set(found)) and len(found) <= k + 5
    assert {count * (1 + j) for j in range(k + 1)} <= set(found)
