"""Prefill through flash-linear-attention against the recurrence, on a CUDA device."""

from __future__ import annotations

import logging

import pytest
import torch

from helpers.gdn_cases import Dtypes, Geometry
from helpers.gdn_prompts import Prompts
from helpers.tolerances import KERNEL_FACTOR
from hybridspec.ops import gated_delta_rule
from hybridspec.ops.gated_delta_rule import fla

pytestmark = [
    pytest.mark.gpu,
    # what the library warns of when it is imported and when Triton compiles for it is its own
    pytest.mark.filterwarnings("default"),
]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
QWEN = Geometry(heads=4, value_heads=8, key_dim=128, value_dim=128)
DTYPES = Dtypes(BF16, F32, BF16)


def check(prompts: Prompts, **options: object) -> torch.Tensor:
    return prompts.check(factor=KERNEL_FACTOR, backend="fla", **options)


def test_the_library_is_there() -> None:
    assert not isinstance(fla.library(), str)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
def test_one_prompt(length: int) -> None:
    check(Prompts.create(length, geometry=QWEN, dtypes=DTYPES, device="cuda"))


@pytest.mark.parametrize(
    "dtypes",
    [DTYPES, Dtypes(F16, F32, F16), Dtypes(BF16, BF16, BF16), Dtypes(BF16, torch.int8, BF16)],
    ids=str,
)
def test_a_ragged_batch_with_padding(dtypes: Dtypes) -> None:
    slots = (2, 0, 5, -1, 6)
    prompts = Prompts.create(
        5, 0, 170, 9, 64, slots=slots, geometry=QWEN, dtypes=dtypes, device="cuda"
    )
    check(prompts, tail=3)


@pytest.mark.parametrize("decay", ["none", "mild", "-30", "-200"])
def test_equal_keys_and_any_decay(decay: str) -> None:
    options = {"decay": decay, "equal_keys": True, "dtypes": DTYPES, "device": "cuda"}
    check(Prompts.create(130, geometry=QWEN, **options))


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(heads=2, value_heads=6, key_dim=64, value_dim=64),
        Geometry(heads=1, value_heads=2, key_dim=256, value_dim=256),
        Geometry(heads=2, value_heads=2, key_dim=96, value_dim=192),
    ],
    ids=str,
)
def test_sizes(geometry: Geometry) -> None:
    options = {"geometry": geometry, "dtypes": DTYPES, "device": "cuda", "is_strided": True}
    check(Prompts.create(100, 33, **options), beta_scale=2.0)


def test_nothing_is_read_on_the_host_and_bits_repeat() -> None:
    outputs, states = [], []
    for turn in range(3):
        prompts = Prompts.create(200, 70, 3, geometry=QWEN, dtypes=DTYPES, device="cuda")
        call = prompts.call(tail=2)
        torch.cuda.set_sync_debug_mode("error" if turn else "default")  # the first one compiles
        try:
            outputs.append(gated_delta_rule.prefill(**call))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        states.append(prompts.pools.state)
    for out, state in zip(outputs[1:], states[1:], strict=True):
        assert torch.equal(out, outputs[0])
        torch.testing.assert_close(state, states[0], rtol=0, atol=0, equal_nan=True)


def test_configurations_are_fixed_in_calls_only() -> None:
    prompts = Prompts.create(64, geometry=QWEN, dtypes=DTYPES, device="cuda")
    check(prompts)
    tuners = fla._tuners()
    assert len(tuners) == len(fla.KERNELS)
    assert all(tuner.configs is theirs and len(theirs) > 1 for tuner, _, theirs in tuners)


def test_what_it_cannot_serve_runs_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    fla._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hybridspec"):
        for _ in range(2):
            Prompts.create(20, dtypes=Dtypes(F32, F32, F32), device="cuda").check()
    [record] = [r for r in caplog.records if "plain PyTorch" in r.getMessage()]
    assert "q has dtype float32" in record.getMessage()
