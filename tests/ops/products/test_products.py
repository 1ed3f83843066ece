"""Products: the reference against the loop, the contract, how sums are cut, compiled kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.triton_process import run_with_compiler
from hybridspec.errors import UnsupportedError
from hybridspec.ops.products import multiply, multiply_in_parts, naive
from hybridspec.ops.products.launch import ROW_COUNTS, choose_launch, num_parts

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# one rounding of the result for 16-bit results; a few of fp32 or fp64
BOUNDS = {F64: 1e-13, F32: 1e-5, F16: 1e-3, BF16: 8e-3}
ONES = torch.ones


def make(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randn(size, generator=generator, dtype=F64).to(dtype)
        for size in ((5, 24), (7, 24), (5, 7))
    ]


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_reference(dtype: torch.dtype, has_residual: bool) -> None:
    x, weight, residual = make(dtype)
    added = residual if has_residual else None
    expected = torch.empty(5, 7, dtype=F64)
    naive.multiply(x, weight, added, expected)
    for wide in (None, torch.promote_types(dtype, F32)):
        found = multiply(x, weight, added, dtype=wide)
        assert found.dtype == (wide or dtype)
        bound = BOUNDS[found.dtype]
        torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_parts_of_sums(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = (
        torch.randn(size, generator=generator, dtype=F64).to(dtype)
        for size in ((3, 4096), (7, 4096))
    )
    parts = multiply_in_parts(x, weight)
    assert parts.shape == (num_parts(7, 4096), 3, 7)
    assert parts.dtype is (F64 if dtype is F64 else F32)
    expected = x.double() @ weight.double().t()
    bound = 1e-11 if dtype is F64 else 1e-3
    torch.testing.assert_close(parts.double().sum(0), expected, rtol=bound, atol=bound)
    first = x[:, :1024].double() @ weight[:, :1024].double().t()
    torch.testing.assert_close(parts[0].double(), first, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: multiply(ONES(3), ONES(2, 3)), ValueError, r"x: expected shape \[N, D\]"),
        (lambda: multiply(ONES(3, 4), ONES(2, 3)), ValueError, r"weight: .*got \[2, 3\]"),
        (lambda: multiply(ONES(3, 4), ONES(2, 4).half()), TypeError, "weight: expected dtype"),
        (lambda: multiply(ONES(3, 4), ONES(4, 2).mT), ValueError, "weight: expected a last"),
        (lambda: multiply(ONES(3, 4), ONES(2, 4), ONES(3, 3)), ValueError, r"residual: .*\[3, 3\]"),
        (lambda: multiply_in_parts(ONES(3, 4), ONES(2, 3)), ValueError, r"weight: .*got \[2, 3\]"),
        (
            lambda: multiply(ONES(3, 4), ONES(2, 4), backend="triton"),
            UnsupportedError,
            "not on a CUDA device|not installed",
        ),
    ],
)
def test_errors(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 12288), (2560, 9216), (24576, 4096)])
def test_parts_follow_from_the_weight(shape: tuple[int, int]) -> None:
    """No number of rows is asked for, and every part is a whole number of the deepest tiles."""
    parts = num_parts(*shape)
    assert 1 <= parts <= 4 and (parts > 1) == (shape[0] < 12288)
    assert shape[1] % (parts * 128) == 0


def test_every_number_of_rows_that_is_looked_at_has_other_tiles() -> None:
    configs = [choose_launch((9, 0), rows, 2) for rows in ROW_COUNTS]
    assert len(set(configs)) == len(ROW_COUNTS)
    assert choose_launch((9, 0), 10**6, 2) in configs


def test_compiled_kernels_do_not_spill() -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    reports = json.loads(run_with_compiler(script, "90"))
    assert [report["kernel"] for report in reports if report["stack_bytes"] > 0] == []
    assert max(report["shared_bytes"] for report in reports) <= 227 * 1024
