"""The kernel against the oracle in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.norm_cases import CASES, EPS, check_add, check_norms, make_norm
from hybridspec.ops.norms import launch

pytestmark = pytest.mark.interpreted

F32, F16 = torch.float32, torch.float16


@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str) -> None:
    check_norms(name, F32, "cpu", 2e-6)


def test_16_bits() -> None:
    check_norms("heads", F16, "cpu", 1e-3)


def test_what_it_refuses() -> None:
    x, gate, weight = make_norm(CASES["heads"], F32)
    wide, four = torch.empty(1, 16385), torch.empty(1, 1, 1, 8)
    ones = torch.ones(8)
    assert launch.explain(x, gate, weight, x, EPS) is None
    for call, reason in (
        ((x, gate.double(), weight, x, EPS), "gate has dtype float64"),
        ((wide, None, wide[0], wide, EPS), "x has rows of 16385, the kernel takes up to 16384"),
        ((four, None, ones, four, EPS), "x has 4 dimensions"),
    ):
        assert reason in launch.explain(*call)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("size", [24, 100])
def test_sums_and_their_norm(num_parts: int, size: int) -> None:
    check_add(num_parts, size, torch.float32, "cpu", 2e-6)
    check_add(num_parts, size, torch.float16, "cpu", 1e-3)
