"""The gates: the reference against the equations, the contract, the kernel in the interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.norm_cases import GATE_CASES, expected_gates, make_gates
from helpers.triton_process import CAPABILITIES, run_with_compiler
from hybridspec.errors import UnsupportedError
from hybridspec.ops.activations import sigmoid_gate, swiglu

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# one rounding of the result for 16-bit results; a few of fp32 or fp64
BOUNDS = {F64: 1e-14, F32: 1e-6, F16: 1e-3, BF16: 8e-3}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", GATE_CASES)
def test_reference(name: str, dtype: torch.dtype) -> None:
    gate_up, y, gate = make_gates(GATE_CASES[name], dtype)
    kept = gate_up.clone(), y.clone()
    found = swiglu(gate_up), sigmoid_gate(y, gate)
    for mine, right in zip(found, expected_gates(gate_up, y, gate), strict=True):
        assert mine.dtype == dtype and mine.is_contiguous()
        spacing = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # of the smallest numbers
        torch.testing.assert_close(
            mine.double(), right, rtol=BOUNDS[dtype], atol=max(1e-12, spacing)
        )
    assert torch.equal(gate_up, kept[0]) and torch.equal(y, kept[1])


def test_output_buffers_are_used() -> None:
    gate_up, y, gate = make_gates(GATE_CASES["odd"], F32)
    right = sigmoid_gate(y, gate)
    out = torch.empty(5, 33)
    assert swiglu(gate_up, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, swiglu(gate_up))
    assert torch.equal(sigmoid_gate(y, gate, out=y), right) and torch.equal(y, right)


ONES = torch.ones


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: swiglu(ONES(3)), ValueError, r"gate_up: expected shape \[N, 2F\].*got \[3\]"),
        (lambda: swiglu(ONES(3, 5)), ValueError, "gate_up: expected an even row size, got 5"),
        (lambda: swiglu(ONES(4, 3).mT), ValueError, "gate_up: expected a last stride of 1"),
        (lambda: swiglu(ONES(3, 4).int()), TypeError, "gate_up: expected dtype"),
        (lambda: swiglu(ONES(3, 4), out=ONES(3, 4)), ValueError, r"out: .*got \[3, 4\]"),
        (lambda: swiglu(ONES(3, 4), out=ONES(3, 2).half()), TypeError, "out: expected dtype"),
        (lambda: swiglu(ONES(3, 4), out=ONES(2, 3).mT), ValueError, "out: expected a last stride"),
        (lambda: sigmoid_gate(ONES(3, 4), ONES(3, 5)), ValueError, r"gate: .*got \[3, 5\]"),
        (lambda: sigmoid_gate(ONES(3, 4), ONES(4, 3).mT), ValueError, "gate: expected a last"),
        (lambda: swiglu(ONES(3, 4), backend="fast"), ValueError, "backend: expected one of 'auto'"),
        (
            lambda: swiglu(ONES(3, 4), backend="triton"),
            UnsupportedError,
            "not on a CUDA device|not installed",
        ),
    ],
)
def test_errors(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_opcheck() -> None:
    _, y, gate = make_gates(GATE_CASES["odd"], F32)
    op = torch.ops.hybridspec.activations_gated.default
    torch.library.opcheck(op, (y, gate, torch.empty(5, 33), True, "auto"))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_kernels_spill_nothing(capability: str) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    reports = json.loads(run_with_compiler(script, capability))
    assert len(reports) == 2
    assert all(report["stack_bytes"] == 0 and report["registers"] <= 64 for report in reports)


def test_the_oracle_has_teeth() -> None:
    gate_up, y, gate = make_gates(GATE_CASES["odd"], F64)
    right = expected_gates(gate_up, y, gate)
    assert not torch.allclose(swiglu(gate_up.roll(33, 1)), right[0], atol=1e-3)
    assert not torch.allclose(sigmoid_gate(gate, y), right[1], atol=1e-3)
