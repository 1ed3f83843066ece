"""The compiled kernels and the grouped product against the definition on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.expert_cases import CASES, Case, MixCall, check_mix
from helpers.no_sync import no_sync
from hybridspec.errors import UnsupportedError
from hybridspec.ops.experts import Matrices, explain_order, mix, order

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str) -> None:
    check_mix(MixCall(CASES[name], BF16, "cuda"), "triton")


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match="in bfloat16 only"):
        MixCall(CASES["odd sizes"], dtype, "cuda").run("triton")
    check_mix(MixCall(CASES["odd sizes"], dtype, "cuda"), "reference")


@pytest.mark.parametrize("name", ["few rows, many experts", "many rows of few experts"])
def test_grouped_product(name: str) -> None:
    call = MixCall(CASES[name], BF16, "cuda")
    call.matrices = call.matrices._replace(
        gate_up=call.matrices.gate_up.contiguous(), down=call.matrices.down.contiguous()
    )
    check_mix(call, "grouped")


@pytest.mark.parametrize("rows", [2, 40, 256, 700])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    """To the bit: alone, among few rows and among many, which other launches serve."""
    call = MixCall(Case(rows, 32, 4, 256, 128, 128), BF16, "cuda")
    check_mix(MixCall(call.case, BF16, "cuda"), "ordered")
    whole = call.run("ordered")
    for row in (0, rows - 1):
        alone = MixCall(call.case._replace(rows=1), BF16, "cuda")
        alone.x, alone.scores, alone.out = (
            tensor[row : row + 1].clone() for tensor in (call.x, call.scores, call.out)
        )
        alone.matrices = call.matrices
        assert torch.equal(alone.run("ordered")[0], whole[row])
    assert explain_order(call.matrices) is None


def test_sums_that_follow_the_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where rows of a batch are added up by another product."""

    def mixed(x: torch.Tensor, *others: Any, backend: str, **options: Any) -> torch.Tensor:
        return mix(x, *others, backend="ordered" if len(x) > 32 else "grouped", **options)

    monkeypatch.setattr(order, "mix", mixed)
    call = MixCall(Case(2, 16, 4, 256, 128, 128), BF16, "cuda")
    reason = explain_order(Matrices(*(matrix.contiguous() for matrix in call.matrices)))
    assert "16 experts of 128, differ in" in reason


@pytest.mark.parametrize("backend", ["triton", "grouped"])
def test_captured(backend: str) -> None:
    """Nothing of it waits for the host."""
    call = MixCall(Case(4, 32, 4, 64, 32, 32), BF16, "cuda")
    call.matrices = call.matrices._replace(
        gate_up=call.matrices.gate_up.contiguous(), down=call.matrices.down.contiguous()
    )
    out = call.out.clone()
    call.run(backend)
    torch.cuda.synchronize()
    with no_sync():
        call.run(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run(backend, out)
    for tensor in (call.x, call.scores):
        tensor.copy_(torch.randn_like(tensor))
    out.copy_(call.out)
    graph.replay()
    torch.testing.assert_close(out, call.run(backend))
