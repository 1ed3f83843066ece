"""The compiled kernel against the oracle on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from helpers.rotary_cases import CASES, check_kernel

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)],
    ids=["fp32", "bf16", "fp16"],
)
def test_kernel(name: str, dtype: torch.dtype, bound: float) -> None:
    """One rounding of the result."""
    check_kernel(name, dtype, "cuda", bound)
