"""The compiled kernel against the oracle on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from helpers.conv_kernel_cases import BATCHES, PROMPTS, check_kernel, check_prefill, check_split

pytestmark = pytest.mark.gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("name", "activation"), [*((name, "silu") for name in BATCHES), ("ragged", None)]
)
def test_verify(name: str, activation: str | None) -> None:
    check_kernel(name, (F32, F32), activation, "cuda", 1e-5)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, F16), (F32, BF16), (BF16, F32)], ids=str)
def test_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check_kernel("ragged", dtypes, "silu", "cuda", 2e-2)


@pytest.mark.parametrize("ring", [BF16, F16], ids=str)
def test_steps_agree_when_the_ring_rounds(ring: torch.dtype) -> None:
    check_split((F32, ring), "cuda")


@pytest.mark.parametrize("name", PROMPTS)
def test_prefill(name: str) -> None:
    check_prefill(name, (F32, F32), "silu", "cuda", 1e-5)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, F16), (F32, BF16), (BF16, F32)], ids=str)
def test_prefill_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check_prefill("later chunk", dtypes, "silu", "cuda", 2e-2)
