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
from hybridspec.ops.norms import RmsNorm, gated_rms_norm, rms_norm

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
    assert len(reports) == 3
    assert all(report["stack_bytes"] == 0 and report["registers"] <= 128 for report in reports)


def test_the_oracle_has_teeth() -> None:
    x, gate, weight = make_norm(CASES["heads"], F64, wide=F64)
    found = gated_rms_norm(x, gate, weight.flip(0), EPS)
    assert not torch.allclose(found, expected(x, gate, weight), atol=1e-3)
