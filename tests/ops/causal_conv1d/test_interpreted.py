"""The kernel against the oracle in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.conv_kernel_cases import BATCHES, PROMPTS, check_kernel, check_prefill, check_split
from hybridspec.ops.causal_conv1d import launch

pytestmark = pytest.mark.interpreted

F32, F16 = torch.float32, torch.float16


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("activation", ["silu", None])
def test_verify(name: str, activation: str | None) -> None:
    check_kernel(name, (F32, F32), activation, "cpu", 1e-5)


@pytest.mark.parametrize("dtypes", [(F16, F16), (F32, F16), (F16, F32)], ids=str)
def test_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check_kernel("ragged", dtypes, "silu", "cpu", 4e-3)


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("activation", ["silu", None])
def test_prefill(name: str, activation: str | None) -> None:
    check_prefill(name, (F32, F32), activation, "cpu", 1e-5)


@pytest.mark.parametrize("dtypes", [(F16, F16), (F32, F16), (F16, F32)], ids=str)
def test_prefill_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check_prefill("later chunk", dtypes, "silu", "cpu", 4e-3)


def test_what_prefill_refuses() -> None:
    x, ring = torch.ones(3, 8), torch.ones(2, 32, 8)
    assert launch.explain_prefill(x, torch.ones(8, 17), ring, x, 3) is None
    reason = launch.explain_prefill(x, torch.ones(8, 18), ring, x, 3)
    assert reason == "weight has 18 taps, the kernel takes up to 17"


def test_steps_agree_when_the_ring_rounds() -> None:
    check_split((F32, F16), "cpu")
