"""Kernels against the reference in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.empty_plans import check_no_requests
from helpers.group_cases import GROUPINGS, group_case
from helpers.plan_cases import KINDS, differences, random_case, reference_plan, run_plan
from helpers.thinned import thinned
from hybridspec.ops.verify_plan import (
    SamplingColumns,
    Step,
    build_params,
    compact_groups,
    compact_hidden,
    compact_sampling,
    copy_page_table,
    launch,
    plan_step,
    select_rows,
)

pytestmark = pytest.mark.interpreted

CONFIGS = {
    "fused": launch.LaunchConfig(is_fused=True, is_one_block=True, select_warps=4),
    "one block": launch.LaunchConfig(is_fused=False, is_one_block=True, select_warps=4),
    "many blocks": launch.LaunchConfig(is_fused=False, is_one_block=False, select_warps=4),
}


@pytest.mark.parametrize(("kind", "name"), thinned(KINDS, list(CONFIGS)))
def test_random_plans(kind: str, name: str) -> None:
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    for trial in range(8):
        num_requests = int(torch.randint(1, 40, (), generator=generator))
        case = random_case(
            generator, num_requests, trial, kind=kind, has_limits=trial % 3 == 1,
            num_bins=(0, 0, 5)[trial % 3], is_staggered=trial % 4 > 0,
        )  # fmt: skip
        plan = run_plan(case, launch.plan_step, config=CONFIGS[name])
        assert differences(plan, reference_plan(case)) == 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    ("num_requests", "num_drafts"),
    [(1, 0), (255, 0), (256, 0), (257, 0), (128, 7), (341, 2), (1025, 0), (585, 6)],
)
def test_sizes(num_requests: int, num_drafts: int, config: launch.LaunchConfig) -> None:
    generator = torch.Generator().manual_seed(num_requests)
    case = random_case(generator, num_requests, num_drafts, kind="ties", share_dead=0.1)
    plan = run_plan(case, launch.plan_step, config=config)
    assert differences(plan, reference_plan(case)) == 0


@pytest.mark.parametrize(("num_requests", "num_drafts"), [(2500, 7), (5000, 3)])
def test_twenty_thousand_rows(num_requests: int, num_drafts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    case = random_case(
        generator, num_requests, num_drafts, kind="uniform", share_dead=0.1, num_rows=9000
    )
    config = launch.launch_config(num_requests, num_drafts)
    assert config.is_one_block == (num_requests == 2500) and not config.is_fused
    plan = run_plan(case, launch.plan_step, config=config)
    assert differences(plan, reference_plan(case)) == 0


def test_the_comparison_sees_another_budget() -> None:
    generator = torch.Generator().manual_seed(1)
    case = random_case(generator, 20, 3, kind="uniform", share_dead=0.0, num_rows=50)
    other = run_plan(case, launch.plan_step)
    case.confidences[3, 0] = 0.0
    assert differences(other, reference_plan(case)) > 0


def test_through_the_public_functions() -> None:
    generator = torch.Generator().manual_seed(2)
    case = random_case(generator, 30, 3, has_limits=True, num_bins=6)
    plan = case.new_plan()
    plan_step(
        case.confidences, case.token_ids, case.slots, case.seq_len, case.history_len, plan=plan,
        ring_start=case.ring_start, num_rows=case.num_rows, num_drafts=case.num_drafts,
        calibration=case.calibration, backend="triton",
    )  # fmt: skip
    assert differences(plan, reference_plan(case)) == 0
    for dtype in (torch.float16, torch.bfloat16):
        confidences = case.confidences.to(dtype)
        found = [
            select_rows(confidences, case.slots, num_rows=case.num_rows, backend=backend)
            for backend in ("triton", "reference")
        ]
        assert torch.equal(*found)


def test_requests_without_rows() -> None:
    """They fold nothing, however full their windows are."""
    found = []
    for backend in ("triton", "reference"):
        plan = Step.create(max_requests=5, max_rows=8, max_drafts=2)
        plan.cu_seqlens.copy_(torch.tensor([0, 2, 2, 4, 5, 5]))
        build_params(
            torch.arange(12).view(4, 3), torch.tensor([1, 0, -1, 2], dtype=torch.int32),
            *torch.tensor([[10, 20, 30], [16, 16, 3]], dtype=torch.int32), plan=plan,
            ring_start=torch.zeros(3, dtype=torch.int32), backend=backend,
        )  # fmt: skip
        found.append(plan)
    assert found[0].is_fold.tolist() == [1, 0, 0, 0, 0]
    assert differences(*found) == 0


@pytest.mark.parametrize(
    ("num_rows", "grouping"), thinned([1, 255, 1023, 1024, 1025, 4097], list(GROUPINGS))
)
def test_groups(num_rows: int, grouping: str) -> None:
    arguments = group_case(num_rows, grouping)
    for num_entries in (num_rows, num_rows + 1500):
        found, expected = (
            compact_groups(*arguments, num_entries=num_entries, hold_request=-3, backend=backend)
            for backend in ("triton", "reference")
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("width", [1, 192, 1500])
def test_hidden_rows(dtype: torch.dtype, width: int) -> None:
    buffer = torch.randn(9, width + 5).to(dtype)
    buffer[2] = torch.nan
    sources = torch.tensor([8, 0, -1, 3, 3], dtype=torch.int32)
    found, expected = (
        compact_hidden(buffer[:, :width], sources, backend=b) for b in ("triton", "reference")
    )
    assert torch.equal(found, expected)


def test_sampling_columns() -> None:
    generator = torch.Generator().manual_seed(3)
    requests = SamplingColumns(
        temperature=torch.rand(7, generator=generator),
        top_k=torch.arange(7, dtype=torch.int32),
        top_p=torch.rand(7, generator=generator),
        min_p=torch.rand(7, generator=generator),
        seeds=torch.randint(-(2**62), 2**62, (7,), generator=generator),
    )
    sources = torch.randint(-1, 28, (300,), generator=generator, dtype=torch.int32)
    found, expected = (
        compact_sampling(requests, sources, rows_per_request=4, backend=backend).tensors()
        for backend in ("triton", "reference")
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_page_tables() -> None:
    source = torch.arange(40_000, dtype=torch.int32).view(20, 2000)
    requests = torch.tensor([19, 0, 7, 7], dtype=torch.int32)
    for width, step in ((1, 1), (1500, 1), (64, 3)):
        buffer = torch.full((4, 3000), -1, dtype=torch.int32)
        expected = buffer.clone()
        view = (slice(None), slice(5, 5 + width * step, step))
        copy_page_table(buffer[view], source, requests, backend="triton")
        copy_page_table(expected[view], source, requests, backend="reference")
        assert torch.equal(buffer, expected)
        assert buffer.ne(-1).sum() == 4 * width


def test_no_requests() -> None:
    check_no_requests("triton")
