"""Norms and gates against their formulas in fp64, and against numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridspec.ops.norms import gated_rms_norm, gdn_gates, l2_norm, rms_norm

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# one rounding of the result for 16-bit results; a few of fp32 or fp64
BOUNDS = {F64: 1e-14, F32: 1e-6, F16: 1e-3, BF16: 8e-3}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=BOUNDS[dtype], atol=1e-12)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("weight_dtype", [F32, BF16], ids=str)
def test_rms_norm(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x = random(3, 5, 24, dtype=dtype)
    weight = random(24, dtype=weight_dtype, seed=1)
    wide = x.double()
    mean = (wide * wide).mean(-1, keepdim=True)
    expected = wide / torch.sqrt(mean + 1e-3) * (1.0 + weight.double())
    assert_near(rms_norm(x, weight, 1e-3), expected, dtype)


def test_rms_norm_by_hand() -> None:
    y = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([0.0, 1.0]), 0.0)
    scale = math.sqrt(2.0) / 5.0
    torch.testing.assert_close(y, torch.tensor([[3.0 * scale, 8.0 * scale]]))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_gated_rms_norm(dtype: torch.dtype) -> None:
    x, gate = random(3, 4, 16, dtype=dtype), random(3, 4, 16, dtype=dtype, seed=1)
    weight = random(16, dtype=torch.promote_types(dtype, F32), seed=2)
    wide, z = x.double(), gate.double()
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
    if dtype in (F16, BF16):
        normed = normed.to(dtype).double()  # the cast ahead of the weight
    expected = normed * weight.double() * z / (1.0 + torch.exp(-z))
    actual = gated_rms_norm(x, gate, weight, 1e-6)
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual.double(), expected, rtol=2 * BOUNDS[dtype], atol=BOUNDS[dtype] * 1e-2
    )


def test_gated_rms_norm_by_hand() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    gate = torch.tensor([[0.0, 100.0]])
    y = gated_rms_norm(x, gate, weight, 0.0)
    torch.testing.assert_close(y, torch.tensor([[0.0, 800.0 * math.sqrt(2.0) / 5.0]]))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_l2_norm(dtype: torch.dtype) -> None:
    x = random(3, 4, 16, dtype=dtype)
    wide = x.double()
    expected = wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) + 1e-2)
    assert_near(l2_norm(x, 1e-2), expected, dtype)
    assert_near(l2_norm(x), wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) + 1e-6), dtype)


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(2, 8)
    for y in (l2_norm(zeros), rms_norm(zeros, torch.ones(8), 1e-6)):
        assert torch.equal(y, zeros)


def test_inputs_are_not_changed() -> None:
    x = random(3, 8, dtype=F32)
    before, weight = x.clone(), torch.ones(8)
    l2_norm(x)
    rms_norm(x, weight, 1e-6)
    gated_rms_norm(x, x, weight, 1e-6)
    gdn_gates(x, x, weight, weight, 2.0)
    assert torch.equal(x, before)
    assert torch.equal(weight, torch.ones(8))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
def test_gdn_gates(dtype: torch.dtype, beta_scale: float) -> None:
    a, b = 4.0 * random(5, 3, dtype=dtype), random(5, 3, dtype=dtype, seed=1)
    wide = F64 if dtype == F64 else F32
    A_log, dt_bias = random(3, dtype=wide, seed=2), random(3, dtype=wide, seed=3)
    log_decay, beta = gdn_gates(a, b, A_log, dt_bias, beta_scale)
    total = a.double() + dt_bias.double()
    softplus = torch.logaddexp(total, torch.zeros_like(total))
    assert_near(log_decay, -torch.exp(A_log.double()) * softplus, wide)
    assert_near(beta, beta_scale / (1.0 + torch.exp(-b.double())), wide)


def test_gdn_gates_by_hand() -> None:
    a = torch.tensor([[math.log(math.e - 1.0), 200.0, -200.0]], dtype=F64)
    A_log = torch.tensor([math.log(2.0), 0.0, 0.0], dtype=F64)
    log_decay, beta = gdn_gates(a, torch.zeros_like(a), A_log, torch.zeros(3, dtype=F64))
    torch.testing.assert_close(log_decay, torch.tensor([[-2.0, -200.0, 0.0]], dtype=F64))
    torch.testing.assert_close(beta, torch.full((1, 3), 0.5, dtype=F64))


def test_wrong_sizes_raise() -> None:
    with pytest.raises(RuntimeError, match="normalized_shape"):
        rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6)
