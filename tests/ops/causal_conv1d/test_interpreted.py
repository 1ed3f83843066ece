"""The kernel against the oracle in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.conv_kernel_cases import BATCHES, PROMPTS, check_kernel, check_prefill, check_split
from hybridspec.ops._requests import Batch
from hybridspec.ops.causal_conv1d import launch
from hybridspec.ops.causal_conv1d.call import Log, Rows, Taps

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
    x, cursors = torch.ones(3, 8), torch.zeros(2, dtype=torch.int32)
    log, batch = Log(torch.ones(2, 32, 8), cursors), Batch(cursors, cursors[:1], 3)
    wide, wider = (Taps(torch.ones(8, width), None, "silu") for width in (17, 18))
    assert launch.explain_prefill(Rows(x, x), wide, log, batch) is None
    reason = launch.explain_prefill(Rows(x, x), wider, log, batch)
    assert reason == "weight has 18 taps, the kernel takes up to 17"


def test_steps_agree_when_the_ring_rounds() -> None:
    check_split((F32, F16), "cpu")
