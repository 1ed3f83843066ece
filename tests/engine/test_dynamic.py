"""Steps whose sizes a policy chooses: the same tokens, whatever it chooses and wherever it runs."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.captured_on_cpu import capture_on_cpu
from helpers.drafters import random_script, run, scripted_engine
from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams
from hybridspec.cli.info import as_json, sections
from hybridspec.engine import memory
from hybridspec.engine.engine import Engine
from hybridspec.engine.graphs import StepGraphs
from hybridspec.speculate import CostTable, DynamicPolicy, StepPlan

COUNT = 8
DRAFTERS = [
    {},
    {"draft_tokens": 7},
    {"draft_tokens": 1},
    {"drafter": "lookup"},
    {"verify_rows": 11},
    {"draft_vocab": range(0, 97, 2)},
    {"acceptance": (0.8, 0.5), "acceptance_spread": 0.3},
]


def make_prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(97) for _ in range(rng.choice([1, 3, 20]))] for _ in range(COUNT)]


def make_params() -> list[SamplingParams]:
    kinds = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}]
    return [SamplingParams(**kinds[i % 2], seed=i, max_tokens=24 + 3 * i) for i in range(COUNT)]


def tokens_of(llm: LLM) -> list[list[int]]:
    results = llm.generate(prompt_token_ids=make_prompts(), sampling_params=make_params())
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def plain(tiny: TinyCheckpoint) -> list[list[int]]:
    return tokens_of(LLM(tiny.folder, speculation="off", device="cpu"))


@pytest.fixture
def random_sizes(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Let the dynamic policy choose anything that it may; what it chose is returned."""
    rng, plans = random.Random(5), []

    def choose(policy: DynamicPolicy, num_requests: int) -> StepPlan:
        depth, policy.drafts = policy.drafts, rng.randrange(policy.num_drafts + 1)
        rows = rng.choice(policy.budgets(num_requests))
        plan = StepPlan(num_requests=num_requests, rows=rows, drafts=policy.drafts, depth=depth)
        plans.append(plan)
        return plan

    monkeypatch.setattr(DynamicPolicy, "choose", choose)
    return plans


@pytest.mark.parametrize("options", DRAFTERS, ids=str)
@pytest.mark.parametrize("late", [0, 1])
def test_any_sizes(
    tiny: TinyCheckpoint,
    plain: list[list[int]],
    random_sizes: list[StepPlan],
    options: dict[str, Any],
    late: int,
) -> None:
    llm = LLM(tiny.folder, speculation="dynamic", device="cpu", **options)
    llm._engine.run_ahead = late
    found = tokens_of(llm)
    if "acceptance" not in options:
        assert found == plain
    drafts = {plan.drafts for plan in random_sizes}
    assert drafts == set(range(llm.config.draft_tokens + 1))
    assert all(len(one) == len(other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("speculation", ["off", "fixed", "dynamic"])
def test_every_mode(tiny: TinyCheckpoint, plain: list[list[int]], speculation: str) -> None:
    llm = LLM(tiny.folder, speculation=speculation, device="cpu")
    assert tokens_of(llm) == plain
    assert llm.config.speculation == speculation
    report = llm.describe().policy
    assert report.steps > 0
    assert report.committed == sum(map(len, plain)) - COUNT  # each first token is the prompt's
    assert set(report.by_drafts) == {"off": {0}, "fixed": {3}}.get(
        speculation, set(report.by_drafts)
    )
    is_chosen = speculation == "dynamic"
    assert (report.expected_tokens > 0) == is_chosen == (report.probes > 0)


def test_a_drafter_of_lists(
    tiny: TinyCheckpoint, plain: list[list[int]], random_sizes: list[StepPlan]
) -> None:
    prompts = make_prompts()
    known = {tuple(p): tokens for p, tokens in zip(prompts, plain, strict=True)}
    engine = scripted_engine(tiny.folder, known, random_script(3), 4, speculation="dynamic")
    requests = run(engine, prompts, make_params())
    assert [request.token_ids for request in requests] == plain
    assert {plan.drafts for plan in random_sizes} == {0, 1, 2, 3, 4}


@pytest.fixture
def captured(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Engines of `COUNT` slots whose steps are captured, and the times of what is captured."""
    times = itertools.count(1)
    capture_on_cpu(monkeypatch, lambda: 1e-3 * next(times))
    plan = memory.plan_pools

    def fixed_pools(resolved: Any) -> Any:
        return replace(
            plan(resolved), num_slots=COUNT, num_pages=64, max_slots=COUNT, can_grow=False
        )

    monkeypatch.setattr(memory, "plan_pools", fixed_pools)
    return lambda **options: LLM(tiny.folder, device="cpu", **options)


@pytest.mark.parametrize("options", DRAFTERS[:-1], ids=str)
def test_captured_steps_of_any_sizes(
    captured: Any,
    plain: list[list[int]],
    random_sizes: list[StepPlan],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What verifying leaves is what proposing and the host find, batch after batch."""
    replayed = set()
    verify, draft = StepGraphs.verify, StepGraphs.draft
    llm = captured(speculation="dynamic", **options)
    monkeypatch.setattr(
        StepGraphs, "verify", lambda *at: replayed.add(("rows", *at[1:])) or verify(*at)
    )
    monkeypatch.setattr(
        StepGraphs, "draft", lambda *at: replayed.add(("drafts", *at[1:])) or draft(*at)
    )
    assert tokens_of(llm) == plain
    assert len({at for at in replayed if at[0] == "rows"}) > 5
    assert {at[2] for at in replayed if at[0] == "drafts"} == {plan.drafts for plan in random_sizes}


@pytest.mark.parametrize("speculation", ["off", "fixed", "dynamic"])
def test_captured_steps_of_every_mode(
    captured: Any, plain: list[list[int]], speculation: str
) -> None:
    llm = captured(speculation=speculation)
    graphs = llm._engine.runner.graphs
    assert graphs.sizes == [1, 2, 4, 8]
    if speculation == "dynamic":
        assert graphs.budgets == {
            1: [1, 2, 3, 4],
            2: [2, 4, 6, 8],
            4: [4, 8, 12, 16],
            8: [8, 12, 16, 24, 32],
        }
    else:
        each = 1 if speculation == "off" else 4
        assert graphs.budgets == {size: [size * each] for size in graphs.sizes}
    assert tokens_of(llm) == plain


def test_costs_are_measured_and_nothing_stays(captured: Any) -> None:
    llm = captured(speculation="dynamic", draft_tokens=2)
    engine: Engine = llm._engine
    costs = engine.runner.policy.costs
    assert isinstance(costs, CostTable) and costs.per_request == 0.0
    timed = [
        *(s for size in (1, 2, 4, 8) for s in [*costs.verify[size].values(), *costs.draft[size]])
    ]
    assert timed == pytest.approx([1e-3 * (1 + i) for i in range(len(timed))])
    assert engine.allocator.num_live == 0 and engine.allocator.num_free_pages == 64
    assert engine.allocator._free_slots[::-1] == list(range(COUNT))
    assert int((engine.runner.decoder.requests.is_done == 0).sum()) == 0


def test_steps_that_are_timed_are_live(captured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They verify drafts of requests that are there: else they would take less time."""
    rows = []
    verify = StepGraphs.verify

    def counted(graphs: StepGraphs, size: int, budget: int) -> None:
        verify(graphs, size, budget)
        rows.append((size, budget, int(graphs._lanes[size].packed[:, 2].sum())))

    monkeypatch.setattr(StepGraphs, "verify", counted)
    captured(speculation="dynamic")
    assert len(rows) == 17
    assert all(found == budget for _, budget, found in rows)


def test_a_step_beside_the_graphs_tells_nothing_of_costs(captured: Any) -> None:
    llm = captured(speculation="dynamic")
    prompts, params = make_prompts(), [replace(one, logprobs=1) for one in make_params()]
    llm.generate(prompt_token_ids=prompts, sampling_params=params)
    policy = llm._engine.runner.policy
    assert policy.costs.per_request == 0.0 and policy.report.seconds == 0.0
    assert policy.report.committed > 0


def test_steps_learn_what_their_rows_are_chosen_by(tiny: TinyCheckpoint) -> None:
    llm = LLM(
        tiny.folder, speculation="dynamic", device="cpu", acceptance=(0.9, 0.1), draft_tokens=2
    )
    decoder = llm._engine.runner.decoder
    before = decoder.calibration.clone()
    for _ in range(4):
        tokens_of(llm)
    policy = llm._engine.runner.policy
    assert policy.report.acceptance[0] == pytest.approx(0.9, abs=0.1)
    assert torch.equal(decoder.calibration, policy.table)
    assert not torch.equal(decoder.calibration, before)


def test_what_is_expected_is_told(captured: Any, tiny: TinyCheckpoint) -> None:
    llm = captured(speculation="dynamic")
    steps = list(
        LLM(tiny.folder, speculation="dynamic", device="cpu").stream(
            prompt_token_ids=[5, 6], sampling_params=SamplingParams(max_tokens=20, temperature=0)
        )
    )
    assert steps[0].expected_tokens is None
    assert all(1 <= step.expected_tokens <= 4 for step in steps[1:])
    tokens_of(llm)
    info = llm.describe()
    shown = dict(sections(info)["sizes of steps"])
    assert shown["1 request"].startswith("1 rows 1.00, 2 rows 2.00")
    assert "to find out" in shown["steps"] and "expected" in shown["tokens"]
    assert as_json(info)["step_costs"]["verify"][1][1] == 1e-3
    policy = json.loads(json.dumps(as_json(info)))["policy"]
    assert policy["steps"] == info.policy.steps == sum(policy["by_drafts"].values())
    assert "sizes of steps" not in sections(LLM(tiny.folder, device="cpu").describe())
