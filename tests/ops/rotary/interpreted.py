"""The kernel against the oracle in Triton's interpreter; run by test_rotary.py."""

from __future__ import annotations

import pytest
import torch

from helpers.rotary_cases import CASES, check_kernel


@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str) -> None:
    check_kernel(name, torch.float32, "cpu", 1e-6)


def test_16_bits() -> None:
    check_kernel("odd sizes", torch.float16, "cpu", 1e-3)
