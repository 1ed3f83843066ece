"""The kernel against the definition in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.accept_cases import expected, random_case
from hybridspec.ops.accept import accept_rows

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("has_counts", [True, False])
def test_equals_the_definition(has_counts: bool) -> None:
    for seed in range(25):
        case = random_case(seed, has_counts=has_counts)
        state, result = expected(case)
        found = accept_rows(case.chosen, **case.arguments, result=case.result(), backend="triton")
        assert torch.equal(found.packed, result.packed)
        assert torch.equal(found.num_committed, result.num_committed)
        for mine, right in zip(case.state(), state, strict=True):
            assert torch.equal(mine, right)
