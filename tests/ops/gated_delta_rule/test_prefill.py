"""Prefill against the recurrence, whole, in parts, and handed over to verify."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.gdn_cases import Dtypes, Geometry, assert_same_bits, offsets
from helpers.gdn_oracle import recurrence
from helpers.gdn_prompts import Prompts
from helpers.tolerances import assert_close, assert_same
from helpers.triton_process import CAPABILITIES, run_with_compiler
from hybridspec.errors import UnsupportedError
from hybridspec.ops import gated_delta_rule

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("dtype", [F64, F32], ids=["fp64", "fp32"])
def test_one_prompt(length: int, dtype: torch.dtype) -> None:
    Prompts.create(length, dtypes=Dtypes(dtype, dtype, dtype)).check()


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 64, 1000])
def test_chunks_of_any_size(chunk_size: int) -> None:
    Prompts.create(70, 3).check(chunk_size=chunk_size)


@pytest.mark.parametrize("dtype", [F64, F32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("decay", ["none", "mild", "-30", "-200"])
def test_equal_keys_and_any_decay(decay: str, dtype: torch.dtype) -> None:
    """64 equal keys without decay: an inverse by doubling would be off by hundreds."""
    options = {"decay": decay, "equal_keys": True, "dtypes": Dtypes(dtype, dtype, dtype)}
    Prompts.create(130, **options).check()


def test_a_ragged_batch_with_padding() -> None:
    Prompts.create(5, 0, 70, 9, 64, slots=(2, 0, 5, -1, 6)).check(tail=3)


def test_only_padding() -> None:
    out = Prompts.create(4, slots=(-1,)).check(tail=2)
    assert out.shape[0] == 6


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_head_ratios(ratio: int) -> None:
    geometry = Geometry(heads=2, value_heads=2 * ratio, key_dim=16, value_dim=48)
    Prompts.create(66, 10, geometry=geometry).check()


@pytest.mark.parametrize(
    "dtypes",
    [
        Dtypes(BF16, F32, BF16),
        Dtypes(BF16, BF16, BF16),
        Dtypes(F16, F16, F16),
        Dtypes(F32, F64, F32),
    ],
    ids=str,
)
def test_dtypes(dtypes: Dtypes) -> None:
    Prompts.create(70, 3, dtypes=dtypes).check()


def test_options() -> None:
    Prompts.create(70, decay="medium").check(scale=0.5, beta_scale=2.0)
    geometry = Geometry(key_dim=4, value_dim=4)
    prompts = Prompts.create(12, geometry=geometry)
    prompts.tokens = replace(prompts.tokens, k=0.3 * prompts.tokens.k)
    prompts.check(scale=0.5, use_qk_l2norm=False)


def test_strided_pools() -> None:
    Prompts.create(70, 3, is_strided=True).check()


def test_given_output() -> None:
    prompts = Prompts.create(5, 4, slots=(1, -1))
    out = torch.full((11, 4, 32), torch.nan, dtype=F64)
    assert prompts.check(tail=2, out=out) is out


@pytest.mark.parametrize("cuts", [(1,), (64,), (7, 70), (33, 34, 35)], ids=str)
def test_a_prompt_in_parts_equals_the_whole(cuts: tuple[int, ...]) -> None:
    whole, parts = Prompts.create(100), Prompts.create(100)
    expected = whole.run()
    outs = []
    for first, last in zip((0, *cuts), (*cuts, 100), strict=True):
        part = replace(parts, lengths=(last - first,), tokens=parts.tokens.rows(first, last))
        outs.append(part.run())
    torch.testing.assert_close(torch.cat(outs), expected, rtol=0.0, atol=1e-12)
    slot = whole.slots[0]
    torch.testing.assert_close(
        parts.pools.state[slot], whole.pools.state[slot], rtol=0.0, atol=1e-12
    )


def test_verify_goes_on_where_prefill_stopped() -> None:
    prompts = Prompts.create(80)
    bounds, slots = offsets([4]), torch.tensor(prompts.slots, dtype=torch.int32)
    head = replace(prompts, lengths=(76,), tokens=prompts.tokens.rows(0, 76))
    rows = prompts.tokens.rows(76, 80)
    y, _, _ = recurrence(prompts.tokens, prompts.pools.state[prompts.slots[0]])
    head.run()
    out = gated_delta_rule.verify(
        *rows.packed(), rows.A_log, rows.dt_bias, prompts.pools.state, prompts.pools.ring, bounds,
        slots, max_verify_tokens=4,
    )  # fmt: skip
    assert_close(out, y[76:], F64)


def test_prefill_of_one_row_equals_verify_of_it() -> None:
    """Which of the two a row is comes from the call, never from its length."""
    prefilled, verified = Prompts.create(1), Prompts.create(1)
    rows = verified.tokens
    out = gated_delta_rule.verify(
        *rows.packed(), rows.A_log, rows.dt_bias, verified.pools.state, verified.pools.ring,
        offsets([1]), torch.tensor(verified.slots, dtype=torch.int32), max_verify_tokens=1,
    )  # fmt: skip
    before = prefilled.pools.state[prefilled.slots[0]].clone()
    assert_same(prefilled.run(), out)
    assert_same_bits(verified.pools.state[verified.slots[0]], before)
    assert not torch.equal(prefilled.pools.state[prefilled.slots[0]], before)


def test_live_rows_must_be_folded_first() -> None:
    prompts = Prompts.create(5, slots=(4,))
    prompts.pools.ring.history_len[4] = 3
    before = prompts.pools.copies()
    with pytest.raises(ValueError, match=r"ring.history_len: expected 0 in slot 4 .*, got 3; fold"):
        prompts.run()
    for actual, old in zip(prompts.pools.tensors(), before, strict=True):
        assert_same_bits(actual, old)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_compiled_kernels_around_the_library_spill_nothing(capability: str) -> None:
    script = Path(__file__).with_name("compile_prefill.py")
    reports = json.loads(run_with_compiler(script, capability))
    assert len(reports) == 5
    assert all(report["stack_bytes"] == 0 for report in reports)


def test_the_library_needs_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="'fla'.*not on a CUDA device|not installed"):
        Prompts.create(5, dtypes=Dtypes(F16, F32, F16)).run(backend="fla")
