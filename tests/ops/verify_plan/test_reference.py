"""The reference against plain Python: scores, selection, building, compaction, wrong calls."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.empty_plans import check_no_requests
from helpers.plan_cases import KINDS, PlanCase, differences, random_case, reference_plan
from hybridspec.errors import UnsupportedError
from hybridspec.ops.verify_plan import (
    SamplingColumns,
    Step,
    build_params,
    compact_hidden,
    compact_sampling,
    plan_step,
    select_rows,
    survival_scores,
)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def lengths_plain(scores: Tensor, slots: Tensor, num_rows: int, limits: list[int]) -> list[int]:
    """Rows of each request, picked one at a time by Python's own sort."""
    lengths = [int(slot >= 0) for slot in slots.tolist()]
    candidates = sorted(
        (-scores[b, j].item(), b, j)
        for b, is_live in enumerate(lengths)
        if is_live
        for j in range(min(limits[b], scores.shape[1]))
    )
    for _, b, j in candidates[: num_rows - sum(lengths)]:
        assert lengths[b] == j + 1, "chosen rows must be the first ones of a request"
        lengths[b] += 1
    return lengths


cases = st.builds(
    lambda seed, requests, drafts, kind, has_limits, bins, is_staggered: random_case(
        torch.Generator().manual_seed(seed),
        requests,
        drafts,
        kind=kind,
        has_limits=has_limits,
        num_bins=bins,
        is_staggered=is_staggered,
    ),
    st.integers(0, 2**32),
    st.integers(1, 9),
    st.integers(0, 9),
    st.sampled_from(KINDS),
    st.booleans(),
    st.sampled_from([0, 1, 4, 10]),
    st.booleans(),
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(case=cases)
def test_selection_equals_plain_python(case: PlanCase) -> None:
    scores = survival_scores(case.confidences, case.calibration)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert (scores.diff(dim=1) <= 0).all()
    k = scores.shape[1]
    limits = [k] * len(case.slots) if case.num_drafts is None else case.num_drafts.tolist()
    chosen = select_rows(
        case.confidences,
        case.slots,
        num_rows=case.num_rows,
        num_drafts=case.num_drafts,
        calibration=case.calibration,
    )
    assert chosen.dtype == torch.int32
    expected = lengths_plain(scores, case.slots, case.num_rows, limits)
    assert chosen.diff().tolist() == expected
    assert chosen[0] == 0 and chosen[-1] <= case.num_rows


@settings(derandomize=True, max_examples=200, deadline=None)
@given(case=cases)
def test_building_equals_plain_python(case: PlanCase) -> None:
    plan = reference_plan(case)
    bounds = plan.cu_seqlens.tolist()
    slots, stored = case.slots.tolist(), case.seq_len.tolist()
    per_request = {"num_verify_tokens": [], "kv_len": [], "slots": [], "is_fold": []}
    rows = []
    for b in range(case.max_requests):
        slot = slots[b] if b < len(slots) else -1
        count = bounds[b + 1] - bounds[b]
        assert (count > 0) == (slot >= 0)
        per_request["num_verify_tokens"].append(count)
        per_request["kv_len"].append(stored[slot] + count if count else 0)
        per_request["slots"].append(slot)
        folds = count > 0 and int(case.history_len[slot]) + count > 16
        if case.ring_start is not None and count > 0 and int(case.ring_start[slot]) == 0:
            folds |= int(case.history_len[slot]) >= 16 - math.floor(16 * (slot * 633 / 1024 % 1))
        per_request["is_fold"].append(int(folds))
        for j in range(count):
            source = b * case.token_ids.shape[1] + j
            rows.append((int(case.token_ids[b, j]), stored[slot] + j, source))
    rows += [(0, 0, -1)] * (case.max_rows - len(rows))
    for name, expected in per_request.items():
        assert getattr(plan, name).tolist() == expected, name
    columns = zip(*rows, strict=True)
    for name, expected in zip(("token_ids", "positions", "sources"), columns, strict=True):
        assert getattr(plan, name).tolist() == list(expected), name


def test_the_comparison_sees_wrong_plans() -> None:
    generator = torch.Generator().manual_seed(0)
    case = random_case(generator, 9, 3, kind="ties", share_dead=0.0, num_rows=20)
    expected = reference_plan(case)
    assert differences(reference_plan(case), expected) == 0
    for tensor in expected.tensors()[:-1]:
        tensor[-1] += 1
        assert differences(reference_plan(case), expected) > 0
        tensor[-1] -= 1
    # Ties in the wrong order, as a selection from the last request on would leave them.
    equal = random_case(generator, 6, 3, kind="equal", share_dead=0.0, num_rows=14)
    chosen = select_rows(equal.confidences, equal.slots, num_rows=14)
    assert chosen.diff().tolist() == [3, 3, 2, 2, 2, 2]
    assert (
        lengths_plain(survival_scores(equal.confidences), equal.slots, 14, [3] * 6)
        != chosen.diff().flip(0).tolist()
    )


def test_scores_by_hand() -> None:
    confidences = torch.tensor(
        [[0.5, 0.5, 0.5], [math.nan, 1.0, 1.0], [2.0, math.inf, 0.25], [-1.0, 1.0, 1.0]]
    )
    expected = [[0.5, 0.25, 0.125], [0, 0, 0], [1, 1, 0.25], [0, 0, 0]]
    assert survival_scores(confidences).tolist() == expected
    # -0 has a sign bit that would order it below everything; a subnormal product counts as 0.
    edges = torch.tensor([[-0.0, 1.0], [1e-30, 1e-15], [1e-40, 1.0], [1e-30, 1.0]])
    scores = survival_scores(edges)
    assert scores.view(torch.int32)[0].tolist() == [0, 0]
    assert scores[1, 1] == 0 and scores[2, 0] == 0 and scores[3, 1] > 0


def test_calibration_by_hand() -> None:
    table = torch.tensor([[0.1, 0.6], [0.5, math.nan], [2.0, 1.0]])
    confidences = torch.tensor([[0.49, 0.2, 0.3], [0.5, 0.9, 1.0], [1.0, math.nan, 0.0]])
    scores = survival_scores(confidences, table)
    expected = torch.tensor([[0.1, 0.05, 0.05], [0.6, 0.0, 0.0], [0.6, 0.3, 0.3]])
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.nan, 0.0, 1.0])
@pytest.mark.parametrize("columns", [3, 4])
def test_degenerate_confidences_give_a_valid_plan(value: float, columns: int) -> None:
    plan = Step.create(max_requests=4, max_rows=9, max_drafts=3)
    plan_step(
        torch.full((4, columns), value),
        torch.arange(16).view(4, 4),
        integers(2, -1, 0, 1),
        integers(5, 6, 7),
        integers(0, 0, 16),
        plan=plan,
    )
    # 3 first rows, 6 drafts by request and position: all are equally good.
    assert plan.cu_seqlens.tolist() == [0, 4, 4, 8, 9]
    assert plan.token_ids.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12]
    assert plan.positions.tolist() == [7, 8, 9, 10, 5, 6, 7, 8, 6]
    assert plan.kv_len.tolist() == [11, 0, 9, 7]
    assert plan.is_fold.tolist() == [1, 0, 0, 0]


def test_a_last_column_too_many_changes_nothing() -> None:
    case = random_case(torch.Generator().manual_seed(3), 8, 3, kind="uniform")
    plans = []
    for extra in (0, 1):
        padded = torch.cat([case.confidences, torch.rand(8, extra)], 1)
        plan = case.new_plan()
        plan_step(
            padded, case.token_ids, case.slots, case.seq_len, case.history_len, plan=plan,
            num_rows=case.num_rows,
        )  # fmt: skip
        plans.append(plan)
    assert differences(*plans) == 0


def test_no_requests() -> None:
    check_no_requests("reference")


def test_zero_drafts_and_zero_requests() -> None:
    chosen = select_rows(torch.zeros(3, 0), integers(4, -1, 0), num_rows=3)
    assert chosen.tolist() == [0, 1, 1, 2]
    limits = torch.zeros(3, dtype=torch.int32)
    chosen = select_rows(torch.ones(3, 2), integers(4, -1, 0), num_rows=9, num_drafts=limits)
    assert chosen.tolist() == [0, 1, 1, 2]
    assert select_rows(torch.zeros(0, 3), integers(), num_rows=0).tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_confidence_dtypes(dtype: torch.dtype) -> None:
    case = random_case(torch.Generator().manual_seed(5), 9, 4, kind="uniform", share_dead=0.0)
    confidences = case.confidences.to(dtype)
    chosen = select_rows(confidences, case.slots, num_rows=20)
    assert torch.equal(chosen, select_rows(confidences.float(), case.slots, num_rows=20))


def test_rows_of_a_plan_made_by_the_caller() -> None:
    plan = Step.create(max_requests=5, max_rows=8, max_drafts=2)
    # A live request without rows, a dead one with rows, and a plan that is larger than the batch.
    plan.cu_seqlens.copy_(offsets([2, 0, 2, 1, 0]))
    build_params(
        torch.arange(12).view(4, 3) + 100,
        integers(1, 0, -1, 2),
        integers(10, 20, 30),
        integers(15, 15, 15),
        plan=plan,
    )
    assert plan.num_verify_tokens.tolist() == [2, 0, 0, 1, 0]
    assert plan.kv_len.tolist() == [22, 0, 0, 31, 0]
    assert plan.slots.tolist() == [1, 0, -1, 2, -1]
    assert plan.is_fold.tolist() == [1, 0, 0, 0, 0]
    build_params(
        torch.arange(12).view(4, 3) + 100,
        integers(1, 0, -1, 2),
        integers(10, 20, 30),
        integers(16, 16, 3),
        plan=plan,
        ring_start=integers(0, 0, 0),
    )
    assert plan.is_fold.tolist() == [1, 0, 0, 0, 0]  # slot 0 has no rows
    assert plan.token_ids.tolist() == [100, 101, 0, 0, 109, 0, 0, 0]
    assert plan.positions.tolist() == [20, 21, 0, 0, 30, 0, 0, 0]
    assert plan.sources.tolist() == [0, 1, -1, -1, 9, -1, -1, -1]


def test_compaction() -> None:
    sources = integers(5, 0, -1, 3)
    hidden = torch.randn(6, 4)
    hidden[1] = torch.nan
    out = compact_hidden(hidden, sources)
    assert torch.equal(out[0], hidden[5]) and torch.equal(out[3], hidden[3])
    assert out[2].eq(0).all()
    strided = torch.full((4, 9), 7.0)
    assert compact_hidden(hidden, sources, out=strided[:, :4]) is not None
    assert torch.equal(strided[:, :4], out) and strided[:, 4:].eq(7).all()

    requests = SamplingColumns(
        temperature=torch.tensor([0.5, 0.7]),
        top_k=integers(10, 20),
        top_p=torch.tensor([0.9, 0.8]),
        min_p=torch.tensor([0.1, 0.2]),
        seeds=torch.tensor([-5, 6]),
    )
    rows = compact_sampling(requests, sources, rows_per_request=3)
    assert rows.top_k.tolist() == [20, 10, 0, 20]
    assert rows.seeds.tolist() == [6, -5, 0, 6]
    torch.testing.assert_close(rows.temperature, torch.tensor([0.7, 0.5, 0.0, 0.7]))
    torch.testing.assert_close(rows.top_p, torch.tensor([0.8, 0.9, 1.0, 0.8]))
    torch.testing.assert_close(rows.min_p, torch.tensor([0.2, 0.1, 0.0, 0.2]))


def small_call() -> dict:
    return {
        "confidences": torch.rand(2, 3),
        "token_ids": torch.zeros(2, 4, dtype=torch.int64),
        "slots": integers(0, 1),
        "seq_len": integers(1, 2),
        "history_len": integers(0, 0),
        "ring_start": integers(0, 0),
        "plan": Step.create(max_requests=2, max_rows=6, max_drafts=3),
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"confidences": torch.rand(2, 2)}, ValueError, "confidences: expected shape"),
        ({"confidences": None}, TypeError, "confidences: expected a tensor"),
        ({"confidences": torch.ones(2, 3).int()}, TypeError, "confidences: expected dtype"),
        ({"confidences": torch.rand(3, 2).T}, ValueError, "confidences: expected a last stride"),
        ({"token_ids": torch.zeros(2, 4).int()}, TypeError, "token_ids: expected dtype int64"),
        ({"token_ids": torch.zeros(2, 0).long()}, ValueError, "token_ids: expected"),
        ({"slots": torch.zeros(2).long()}, TypeError, "slots: expected dtype int32"),
        ({"seq_len": integers(1)}, ValueError, "history_len: expected shape"),
        ({"ring_start": integers(1)}, ValueError, "ring_start: expected shape"),
        ({"ring_start": torch.zeros(2)}, TypeError, "ring_start: expected dtype int32"),
        ({"num_rows": 1}, ValueError, "num_rows: expected at least one row"),
        ({"num_rows": 7}, ValueError, "num_rows: expected at most the plan's 6"),
        ({"num_drafts": integers(1)}, ValueError, "num_drafts: expected shape"),
        ({"calibration": torch.rand(2, 4)}, ValueError, "calibration: expected shape"),
        ({"calibration": torch.rand(4, 3).T}, ValueError, "calibration: expected a contiguous"),
        ({"backend": "cute"}, ValueError, "backend: expected one of"),
        ({"backend": None}, TypeError, "backend: expected a text, got None"),
        ({"num_rows": "6"}, TypeError, "num_rows: expected an integer, got '6'"),
        ({"max_window": 0}, ValueError, "max_window: expected at least 1, got 0"),
        ({"max_window": 16.0}, TypeError, "max_window: expected an integer, got 16.0"),
        ({"slots": integers(0, 99)}, ValueError, "slots: expected slots below"),
        ({"plan": None}, TypeError, "plan: expected a Step, got NoneType"),
        (
            {"plan": Step.create(max_requests=1, max_rows=6, max_drafts=3)},
            ValueError,
            "plan: expected room for 2",
        ),
        (
            {"plan": Step.create(max_requests=2, max_rows=6, max_drafts=1)},
            ValueError,
            "plan.workspace: expected at least",
        ),
    ],
)
def test_wrong_calls(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_step(**{**small_call(), **change})


def test_kernels_are_refused_on_a_cpu() -> None:
    with pytest.raises(UnsupportedError, match="not on a CUDA device|Triton is not installed"):
        plan_step(**small_call(), backend="triton")


def test_kernels_refuse_more_drafts_than_their_counters_hold() -> None:
    with pytest.raises(UnsupportedError, match="at most 7 drafts a request, got 8"):
        select_rows(torch.rand(2, 8), integers(0, 1), num_rows=4, backend="triton")


def test_more_wrong_calls() -> None:
    with pytest.raises(ValueError, match="max_rows: expected at least"):
        Step.create(max_requests=3, max_rows=2, max_drafts=1)
    with pytest.raises(ValueError, match="out: expected at least"):
        select_rows(torch.rand(2, 3), integers(0, 1), num_rows=4, out=integers(0, 0))
    with pytest.raises(TypeError, match="sources: expected dtype int32"):
        compact_hidden(torch.rand(2, 3), torch.zeros(2).long())
    with pytest.raises(ValueError, match="rows_per_request"):
        compact_sampling(SamplingColumns.create(2), integers(0), rows_per_request=0)


def test_registered_ops() -> None:
    case = random_case(torch.Generator().manual_seed(8), 4, 3, has_limits=True, num_bins=4)
    plan = reference_plan(case)
    ops = torch.ops.hybridspec
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    drafts, token_ids, slots, cursors, num_rows = case.call()
    fields = (*plan.tensors(), plan.max_seqlen, plan.is_prefill)
    for op, arguments in (
        (
            ops.verify_plan_select_rows,
            (*drafts, slots, num_rows, plan.cu_seqlens, plan.workspace, "auto"),
        ),
        (ops.verify_plan_build_params, (token_ids, slots, *cursors, *fields, "auto")),
        (
            ops.verify_plan_plan_step,
            (*drafts, token_ids, slots, *cursors, num_rows, *fields, "auto"),
        ),
        (
            ops.verify_plan_compact_hidden,
            (torch.rand(3, 4), integers(1, -1), torch.rand(2, 4), "auto"),
        ),
    ):  # fmt: skip
        torch.library.opcheck(op.default, arguments, test_utils=checks)


def test_compiles_as_one_graph() -> None:
    call = small_call()
    plan = call.pop("plan")

    def step(confidences: Tensor) -> Tensor:
        plan_step(**{**call, "confidences": confidences}, plan=plan)
        return plan.token_ids + plan.positions

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    confidences = torch.rand(2, 3)
    assert torch.equal(compiled(confidences), step(confidences))
