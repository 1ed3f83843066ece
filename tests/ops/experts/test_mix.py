"""The mixture of experts: the reference against the definition, ties, NaN, errors, compiling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.expert_cases import CASES, Case, MixCall, check_mix
from helpers.tolerances import assert_same
from helpers.triton_process import CAPABILITIES, run_with_compiler
from hybridspec.errors import UnsupportedError
from hybridspec.ops.experts import Matrices, cpu, grouped, mix

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("has_columns", [False, True])
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_reference(name: str, dtype: torch.dtype, has_columns: bool) -> None:
    check_mix(MixCall(CASES[name], dtype, has_columns=has_columns), "reference")


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    experts=st.integers(1, 7),
    data=st.data(),
    is_normalized=st.booleans(),
)
def test_any_sizes(rows: int, experts: int, data: st.DataObject, is_normalized: bool) -> None:
    per_row = data.draw(st.integers(1, experts))
    check_mix(MixCall(Case(rows, experts, per_row, 8, 8, 10, is_normalized), F64), "reference")


def test_of_equal_scores_the_first_expert_counts() -> None:
    scores = torch.tensor([[1.0, 2.0, -0.0, 2.0, 0.0, 2.0, 1.0], [0.0] * 7])
    _, experts = cpu.route(scores, 5, True)
    assert experts.tolist() == [[1, 3, 5, 0, 6], [0, 1, 2, 3, 4]]
    _, experts = cpu.route(scores, 7, True)
    assert experts[0].tolist() == [1, 3, 5, 0, 6, 2, 4]


def test_a_row_of_nan_spoils_no_other() -> None:
    call = MixCall(CASES["many rows of few experts"], F32)
    right = call.run("reference")
    call.x[3], call.scores[3] = torch.nan, torch.nan
    out = call.run("reference")
    assert out[3].isnan().all()
    others = [row for row in range(len(out)) if row != 3]
    assert_same(out[others], right[others])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_products_at_once_and_one_by_one_agree(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, 8, generator=generator).to(dtype)
    weight = torch.randn(5, 16, 8, generator=generator).to(dtype)
    ends = torch.tensor([0, 4, 4, 10, 11], dtype=torch.int32)  # experts 0 and 2 have no rows
    at_once = grouped.products_at_once(x, weight, ends)
    one_by_one = cpu.products_one_by_one(x, weight, ends)
    assert at_once.dtype is one_by_one.dtype is dtype
    torch.testing.assert_close(at_once, one_by_one, atol=1e-6, rtol=1e-2)
    right = torch.cat((x[:4] @ weight[1].t(), x[4:10] @ weight[3].t()))
    torch.testing.assert_close(one_by_one[:10], right, atol=1e-6, rtol=1e-2)


ZERO = torch.zeros


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": ZERO(5, 4, 2)}, ValueError, r"x: expected shape \[N, D\].*got \[5, 4, 2\]"),
        ({"x": ZERO(40, 5).mT}, ValueError, "x: expected a last stride of 1"),
        ({"x": ZERO(5, 40).int()}, TypeError, "x: expected dtype"),
        ({"scores": ZERO(5, 7)}, ValueError, r"scores: .*\[5, 8\], got \[5, 7\]"),
        ({"scores": ZERO(5, 8).double()}, TypeError, "scores: expected dtype float32"),
        ({"gate_up": ZERO(7, 49, 40)}, ValueError, "gate_up: expected an even number of rows"),
        ({"gate_up": ZERO(7, 48, 41)}, ValueError, r"gate_up: .*got \[7, 48, 41\]"),
        ({"gate_up": ZERO(7, 48, 40).half()}, TypeError, "gate_up: expected the dtype of x"),
        ({"down": ZERO(7, 40, 23)}, ValueError, r"down: .*\[7, 40, 24\], got \[7, 40, 23\]"),
        ({"shared_gate_up": ZERO(111, 40)}, ValueError, "shared_gate_up: expected an even"),
        ({"shared_down": ZERO(40, 55)}, ValueError, r"shared_down: .*got \[40, 55\]"),
        ({"out": ZERO(5, 41)}, ValueError, r"out: .*\[5, 40\], got \[5, 41\]"),
        ({"out": ZERO(5, 40).half()}, TypeError, "out: expected dtype float32"),
        ({"experts_per_row": 8}, ValueError, "experts_per_row: expected at most 7, got 8"),
        ({"experts_per_row": 0}, ValueError, "experts_per_row: expected at least 1, got 0"),
        ({"experts_per_row": "2"}, TypeError, "experts_per_row: expected an integer"),
        ({"is_normalized": "no"}, TypeError, "is_normalized: expected True or False"),
        ({"backend": "fast"}, ValueError, "backend: expected one of 'auto'"),
        ({"backend": "grouped"}, UnsupportedError, "on a CPU it is slower"),
        ({"backend": "triton"}, UnsupportedError, "not on a CUDA device|not installed"),
    ],
    ids=str,
)
def test_errors(changes: dict[str, object], error: type[Exception], text: str) -> None:
    call = MixCall(CASES["odd sizes"], F32)
    matrices = call.matrices._replace(
        **{name: value for name, value in changes.items() if name in Matrices._fields}
    )
    others = {name: value for name, value in changes.items() if name not in Matrices._fields}
    arguments = {"x": call.x, "scores": call.scores, "matrices": matrices, "out": call.out}
    with pytest.raises(error, match=text):
        mix(**{**arguments, "experts_per_row": 3, **others})


def test_opcheck() -> None:
    call = MixCall(CASES["odd sizes"], F32)
    op = torch.ops.hybridspec.experts_mix.default
    tensors = (call.x.clone(), call.scores.clone(), *call.matrices, call.out.clone())
    torch.library.opcheck(op, (*tensors, 3, True, "auto"))


def test_compile() -> None:
    def layer(x: Tensor, call: MixCall) -> Tensor:
        out = mix(x * 2, call.scores, call.matrices, torch.zeros_like(x), experts_per_row=3)
        return out + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (3, 4):
        call = MixCall(Case(rows, 7, 3, 32, 16, 16), F64)
        torch.testing.assert_close(compiled(call.x, call), layer(call.x, call))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_kernels_spill_nothing(capability: str) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    reports = json.loads(run_with_compiler(script, capability))
    assert len(reports) == 6
    assert [report for report in reports if report["stack_bytes"] > 0] == []
    products = [
        report for report in reports if report["kernel"].endswith(("up_kernel", "n_kernel"))
    ]
    # Weights are asked for some products ahead.
    assert all(report["shared_bytes"] > 3 * 2 * 16 * 256 for report in products)


@pytest.mark.parametrize("spoil", ["x", "scores", *Matrices._fields])
def test_teeth_everything_counts(spoil: str) -> None:
    call = MixCall(CASES["all experts"], F64)
    right = call.run("reference")
    spoilt = getattr(call, spoil) if spoil in ("x", "scores") else getattr(call.matrices, spoil)
    spoilt[0] += 0.1
    assert (call.run("reference") - right).abs().max() > 1e-3
