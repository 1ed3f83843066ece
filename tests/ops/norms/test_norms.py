"""Norms and gates against their formulas in fp64, and against numbers by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.norm_cases import CASES, EPS, expected, make_norm
from helpers.triton_process import run_interpreted, run_with_compiler
from hybridspec.errors import UnsupportedError
from hybridspec.models.layers import RmsNorm
from hybridspec.ops.norms import gated_rms_norm, gdn_gates, l2_norm, rms_norm

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# one rounding of the result for 16-bit results; a few of fp32 or fp64
BOUNDS = {F64: 1e-14, F32: 1e-6, F16: 1e-3, BF16: 8e-3}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    spacing = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # of the smallest numbers
    torch.testing.assert_close(
        actual.double(), expected, rtol=BOUNDS[dtype], atol=max(1e-12, spacing)
    )


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_rms_norm(name: str, dtype: torch.dtype) -> None:
    x, _, weight = make_norm(CASES[name], dtype, wide=torch.promote_types(dtype, F32))
    assert_near(rms_norm(x, weight, EPS), expected(x, None, weight), dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gated_rms_norm(name: str, dtype: torch.dtype) -> None:
    """Rounded once, at the end: the bound holds one rounding."""
    x, gate, weight = make_norm(CASES[name], dtype, wide=torch.promote_types(dtype, F32))
    assert_near(gated_rms_norm(x, gate, weight, EPS), expected(x, gate, weight), dtype)


def test_rms_norm_by_hand() -> None:
    y = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    scale = math.sqrt(2.0) / 5.0
    torch.testing.assert_close(y, torch.tensor([[3.0 * scale, 8.0 * scale]]))


def test_gated_rms_norm_by_hand() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    gate = torch.tensor([[0.0, 100.0]])
    y = gated_rms_norm(x, gate, weight, 0.0)
    torch.testing.assert_close(y, torch.tensor([[0.0, 800.0 * math.sqrt(2.0) / 5.0]]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_it_is_the_norm_of_the_model(name: str, dtype: torch.dtype) -> None:
    """What a layer computes on a CPU in few operators differs by rounding alone."""
    x, gate, weight = make_norm(CASES[name], dtype)
    layer = RmsNorm(weight, EPS)
    for found, right in (
        (layer.forward(x), expected(x, None, weight)),
        (layer.forward_gated(x, gate), expected(x, gate, weight)),
    ):
        assert_near(found, right, dtype)


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
    rms_norm(x, weight, EPS)
    gated_rms_norm(x, x, weight, EPS)
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


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"weight": torch.ones(7)}, ValueError, r"weight: .*got \[7\] for x \[5, 3, 8\]"),
        ({"weight": torch.ones(5, 3, 8)}, ValueError, r"weight: .*got \[5, 3, 8\]"),
        ({"weight": torch.ones(16)[::2]}, ValueError, "weight: expected a last stride of 1"),
        ({"weight": torch.ones(8).half()}, TypeError, "weight: expected dtype float32, float64"),
        ({"x": torch.ones(5, 8, 3).mT}, ValueError, "x: expected a last stride of 1"),
        ({"x": torch.ones(5, 3, 8).int()}, TypeError, "x: expected dtype"),
        ({"gate": torch.ones(5, 3, 4)}, ValueError, r"gate: expected the shape of x \[5, 3, 8\]"),
        ({"gate": torch.ones(5, 3, 8).int()}, TypeError, "gate: expected dtype"),
        ({"out": torch.ones(5, 8, 3).mT}, ValueError, "out: expected a last stride of 1"),
        ({"out": torch.ones(5, 3, 8).half()}, TypeError, "out: expected dtype float32"),
        ({"backend": "fast"}, ValueError, "backend: expected one of 'auto'"),
        ({"backend": "triton"}, UnsupportedError, "not on a CUDA device|not installed"),
    ],
    ids=str,
)
def test_errors(changes: dict, error: type[Exception], text: str) -> None:
    call = {"x": torch.ones(5, 3, 8), "gate": torch.ones(5, 3, 8), "weight": torch.ones(3, 8)}
    with pytest.raises(error, match=text):
        gated_rms_norm(**(call | {"eps": EPS} | changes))


def test_opcheck() -> None:
    x, gate, weight = make_norm(CASES["heads"], F32)
    op = torch.ops.hybridspec.rms_norm.default
    torch.library.opcheck(op, (x, gate, weight, EPS, torch.empty(x.shape), "auto"))


def test_the_interpreted_kernel_equals_the_oracle() -> None:
    run_interpreted(Path(__file__).with_name("interpreted.py"))


def test_compiled_kernels_spill_nothing() -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    reports = json.loads(run_with_compiler(script, "80", "90", "100"))
    assert len(reports) == 9
    assert all(report["stack_bytes"] == 0 and report["registers"] <= 128 for report in reports)


def test_the_oracle_has_teeth() -> None:
    x, gate, weight = make_norm(CASES["heads"], F64, wide=F64)
    found = gated_rms_norm(x, gate, weight.flip(0), EPS)
    assert not torch.allclose(found, expected(x, gate, weight), atol=1e-3)
