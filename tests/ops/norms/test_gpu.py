"""The compiled kernel against the oracle on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from helpers.norm_cases import CASES, check_add, check_norms

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


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("size", [24, 100, 4096, 5120])
def test_sums_and_their_norm(num_parts: int, size: int) -> None:
    check_add(num_parts, size, torch.float32, "cuda", 2e-6)
    check_add(num_parts, size, torch.bfloat16, "cuda", 8e-3)
