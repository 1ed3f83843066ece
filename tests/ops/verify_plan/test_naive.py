"""The definition and what a CPU runs: the same plans."""

from __future__ import annotations

import pytest
import torch

from helpers.plan_cases import KINDS, differences, random_case, run_plan
from hybridspec.ops.verify_plan import cpu, naive


@pytest.mark.parametrize("kind", KINDS)
def test_equals_what_a_cpu_runs(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    for num_requests, num_drafts in ((1, 3), (5, 0), (7, 4), (12, 7)):
        case = random_case(
            generator, num_requests, num_drafts, kind=kind, has_limits=num_requests > 5,
            num_bins=4 * (num_drafts == 4),
        )  # fmt: skip
        assert differences(run_plan(case, naive.plan_step), run_plan(case, cpu.plan_step)) == 0
