"""The compiled kernel against the oracle on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from helpers.norm_cases import CASES, check_norms

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str) -> None:
    check_norms(name, torch.float32, "cuda", 2e-6)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)], ids=["bf16", "fp16"]
)
@pytest.mark.parametrize("name", ["wide rows", "one weight for all heads"])
def test_16_bits(name: str, dtype: torch.dtype, bound: float) -> None:
    """One rounding of the result."""
    check_norms(name, dtype, "cuda", bound)
