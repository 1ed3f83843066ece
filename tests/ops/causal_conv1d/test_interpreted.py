"""The kernel against the oracle in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.conv_kernel_cases import BATCHES, check_kernel, check_split

pytestmark = pytest.mark.interpreted

F32, F16 = torch.float32, torch.float16


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("activation", ["silu", None])
def test_verify(name: str, activation: str | None) -> None:
    check_kernel(name, (F32, F32), activation, "cpu", 1e-5)


@pytest.mark.parametrize("dtypes", [(F16, F16), (F32, F16), (F16, F32)], ids=str)
def test_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check_kernel("ragged", dtypes, "silu", "cpu", 4e-3)


def test_steps_agree_when_the_ring_rounds() -> None:
    check_split((F32, F16), "cpu")
