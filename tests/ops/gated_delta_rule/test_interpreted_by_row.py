"""Kernels with cursors of batch rows against the reference, interpreted."""

from __future__ import annotations

import pytest
import torch

from helpers.gdn_cases import Dtypes, assert_same_bits
from helpers.gdn_row_calls import RowCall
from helpers.prefix_calls import PrefixCall
from hybridspec.ops._triton_support import explain_tensors

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]


def test_kernels_are_interpreted() -> None:
    assert explain_tensors([("x", torch.zeros(1))]) is None


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.parametrize("capacity", [16, 32])
@pytest.mark.parametrize("has_output", [False, True])
def test_verify_rows(num_tokens: int, capacity: int, has_output: bool) -> None:
    fold_threshold = None if capacity == 16 else 17 - num_tokens
    RowCall(num_tokens, capacity).compare("triton", has_output, fold_threshold=fold_threshold)


def test_defaults() -> None:
    call = RowCall(4, 16)
    call.slots, call.ring_start = None, None
    call.compare("triton", False)
    call.compare("triton", True, fold_threshold=1, scale=0.5, use_qk_l2norm=False, beta_scale=2.0)


@pytest.mark.parametrize("A_log", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dt_bias", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_sixteen_bits(A_log: torch.dtype, dt_bias: torch.dtype) -> None:
    call = RowCall(2, 32)
    call.check_widening("triton", A_log, dt_bias)
    call.A_log, call.dt_bias = call.A_log.to(A_log), call.dt_bias.to(dt_bias)
    call.compare("triton", False, fold_threshold=9)


@pytest.mark.parametrize("capacity", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_materialize_rows(dtype: torch.dtype, capacity: int) -> None:
    call = PrefixCall(Dtypes(dtype, dtype, dtype), capacity)
    active = torch.tensor([2, -1, 0, 7, 99, 1, 3, 5], dtype=torch.int32)
    bound = 1e-6 if dtype == torch.float32 else 2e-3
    for count in (0, 3, 99):
        num_active = torch.tensor([count], dtype=torch.int32)
        options = {"active": active, "num_active": num_active}
        found, expected = (call.run(backend=name, **options) for name in ("triton", "reference"))
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound, equal_nan=True)
    assert_same_bits(call.run(backend="triton"), found)
    assert_same_bits(found[11], call.pools.state[3])
