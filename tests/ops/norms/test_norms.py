"""Norms and gates against their formulas in fp64, and against numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from hybridspec.ops.norms import RmsNorm, gdn_gates

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# one rounding of the result for 16-bit results; a few of fp32 or fp64
BOUNDS = {F64: 1e-14, F32: 1e-6, F16: 1e-3, BF16: 8e-3}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=BOUNDS[dtype], atol=1e-12)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, F32)


def in_fp64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(24,), (5, 24)], ids=["rows", "heads"])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = random(3, 5, 24, dtype=dtype)
    weight = random(*shape, dtype=wide_dtype(dtype), seed=1)
    norm = RmsNorm(weight, 1e-3)
    assert_near(norm.forward(x), in_fp64(x, weight, 1e-3), dtype)
    assert norm.wide(x).dtype == weight.dtype


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_gated_norm_rounds_once(dtype: torch.dtype) -> None:
    x, gate = random(3, 4, 16, dtype=dtype), random(3, 4, 16, dtype=dtype, seed=1)
    weight = random(16, dtype=wide_dtype(dtype), seed=2)
    z = gate.double()
    expected = in_fp64(x, weight, 1e-6) * z / (1.0 + torch.exp(-z))
    assert_near(RmsNorm(weight, 1e-6).forward_gated(x, gate), expected, dtype)


def test_norms_by_hand() -> None:
    x, weight, scale = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), math.sqrt(2.0) / 5.0
    norm = RmsNorm(weight, 0.0)
    torch.testing.assert_close(norm.forward(x), torch.tensor([[3.0 * scale, 8.0 * scale]]))
    gated = norm.forward_gated(x, torch.tensor([[0.0, 100.0]]))
    torch.testing.assert_close(gated, torch.tensor([[0.0, 800.0 * scale]]))


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(2, 8)
    assert torch.equal(RmsNorm(torch.ones(8), 1e-6).forward(zeros), zeros)


def test_inputs_are_not_changed() -> None:
    x = random(3, 8, dtype=F32)
    before, weight = x.clone(), torch.ones(8)
    norm = RmsNorm(weight, 1e-6)
    norm.forward(x)
    norm.forward_gated(x, x)
    gdn_gates(x, x, weight, weight, 2.0)
    assert torch.equal(x, before)
    assert torch.equal(weight, torch.ones(8))


def error_of(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_norms_are_those_of_transformers(dtype: torch.dtype) -> None:
    """Its gated norm rounds twice in bf16, so it is held to the formula: ours errs less."""
    x, gate = 3 * random(40, 128, dtype=dtype), random(40, 128, dtype=dtype, seed=1)
    stored = random(128, dtype=F32, seed=2)
    block, gated = Qwen3_5RMSNorm(128, 1e-6), Qwen3_5RMSNormGated(128, 1e-6)
    with torch.no_grad():
        block.weight.copy_(stored)
        gated.weight.copy_(stored)
        theirs = block(x), gated(x, gate).to(dtype)
    z = gate.double()
    right = (
        in_fp64(x, 1.0 + stored, 1e-6),
        in_fp64(x, stored, 1e-6) * z / (1.0 + torch.exp(-z)),
    )
    ours = (
        RmsNorm(1.0 + stored, 1e-6).forward(x),
        RmsNorm(stored, 1e-6).forward_gated(x, gate),
    )
    for mine, other, expected in zip(ours, theirs, right, strict=True):
        assert mine.dtype == other.dtype == dtype
        scale = float(expected.abs().max())
        torch.testing.assert_close(mine, other, rtol=2 * BOUNDS[dtype], atol=BOUNDS[dtype] * scale)
        assert error_of(mine, expected) <= 1.1 * error_of(other, expected) + 1e-7


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
