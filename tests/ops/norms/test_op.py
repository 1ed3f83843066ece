"""One launch for a norm: the reference against the equation, the contract, the layer's form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.norm_cases import CASES, EPS, expected, make_norm
from helpers.triton_process import CAPABILITIES, run_with_compiler
from hybridspec.errors import UnsupportedError
from hybridspec.ops.norms import RmsNorm, add_rms_norm, gated_rms_norm, rms_norm

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# one rounding of the result for 16-bit results; a few of fp32 or fp64
BOUNDS = {F64: 1e-14, F32: 1e-6, F16: 1e-3, BF16: 8e-3}


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
    op = torch.ops.hybridspec.norms_rms_norm.default
    torch.library.opcheck(op, (x, gate, weight, torch.empty(x.shape), EPS, "auto"))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_kernels_spill_nothing(capability: str) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    reports = json.loads(run_with_compiler(script, capability))
    assert len(reports) == 4
    assert all(report["stack_bytes"] == 0 and report["registers"] <= 128 for report in reports)


def test_the_oracle_has_teeth() -> None:
    x, gate, weight = make_norm(CASES["heads"], F64, wide=F64)
    found = gated_rms_norm(x, gate, weight.flip(0), EPS)
    assert not torch.allclose(found, expected(x, gate, weight), atol=1e-3)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_sums_and_their_norm(dtype: torch.dtype, num_parts: int) -> None:
    wide = torch.promote_types(dtype, F32)
    generator = torch.Generator().manual_seed(2)
    parts, weight = (
        torch.randn(shape, generator=generator, dtype=wide) for shape in ((num_parts, 4, 9), (9,))
    )
    residual = torch.randn(4, 9, generator=generator, dtype=F64).to(dtype)
    before, kept = residual.to(F64, copy=True), parts.clone()
    found = add_rms_norm(parts, residual, weight, EPS)
    bound = max(BOUNDS[dtype], 1e-13)
    torch.testing.assert_close(
        residual.double(), parts.double().sum(0) + before, rtol=bound, atol=bound
    )
    assert_near(found, expected(residual, None, weight), dtype)
    assert torch.equal(parts, kept)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"parts": torch.ones(4, 9)}, ValueError, r"parts: expected shape \[P, N, D\]"),
        ({"parts": torch.ones(0, 4, 9)}, ValueError, "parts: expected one or more, got 0"),
        ({"parts": torch.ones(2, 4, 9).half()}, TypeError, "parts: expected dtype float32"),
        ({"parts": torch.ones(2, 9, 4).mT}, ValueError, "parts: expected a last stride of 1"),
        ({"residual": torch.ones(3, 9)}, ValueError, r"residual: .*got \[3, 9\]"),
        ({"residual": torch.ones(4, 9).int()}, TypeError, "residual: expected dtype"),
        ({"weight": torch.ones(8)}, ValueError, r"weight: .*got \[8\]"),
        ({"weight": torch.ones(9).double()}, TypeError, "weight: expected dtype float32"),
        ({"out": torch.ones(4, 9).half()}, TypeError, "out: expected dtype float32"),
    ],
)
def test_what_a_sum_refuses(changes: dict, error: type[Exception], text: str) -> None:
    call = {"parts": torch.ones(2, 4, 9), "residual": torch.ones(4, 9), "weight": torch.ones(9)}
    with pytest.raises(error, match=text):
        add_rms_norm(**{**call, **changes}, eps=EPS)
