"""The kernel against the oracle in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.norm_cases import GATE_CASES, check_gates
from hybridspec.ops.activations import launch

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("name", GATE_CASES)
def test_kernel(name: str) -> None:
    check_gates(name, torch.float32, "cpu", 2e-6)


def test_16_bits() -> None:
    check_gates("odd", torch.float16, "cpu", 1e-3)


def test_what_it_refuses() -> None:
    x = torch.ones(2, 4)
    assert launch.explain(x, x, x, True) is None
    assert launch.explain(x, x.double(), x, True) == "gate has dtype float64"
