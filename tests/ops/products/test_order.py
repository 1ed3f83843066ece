"""Another order of the terms of a sum is found, however few sums there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridspec.ops.products import explain_order, order, rows_as_torch
from hybridspec.ops.products.launch import ROW_COUNTS

WEIGHT = torch.zeros(3, 128, dtype=torch.bfloat16)


def added_up(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Return x W^T in fp32, each part of a sum from its first term on, then the parts in order."""
    made = torch.zeros(parts, x.shape[0], weight.shape[0])
    for part, columns in enumerate(torch.arange(x.shape[1]).chunk(parts)):
        for column in columns:
            made[part] += x[:, column, None].float() * weight[:, column].float()
    return made.cumsum(0)[-1]


def in_order(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return added_up(x, weight, 1).to(dtype)


def test_a_library_that_splits_for_some_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six sums, rounded to bf16, are enough to see it."""

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return added_up(x, weight, 2 if x.shape[0] == 2 else 1).to(x.dtype)

    monkeypatch.setattr(order, "multiply", in_order)
    monkeypatch.setattr(order.F, "linear", linear)
    assert rows_as_torch(WEIGHT, [1, 2, 5]) == {1, 5}
    assert rows_as_torch(WEIGHT, []) == set()


@pytest.mark.parametrize("split", [0, *ROW_COUNTS])
def test_a_kernel_that_splits_for_some_numbers_of_rows(
    monkeypatch: pytest.MonkeyPatch, split: int
) -> None:
    def multiply(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return added_up(x, weight, 2 if x.shape[0] == split else 1).to(dtype)

    monkeypatch.setattr(order, "multiply", multiply)
    reason = explain_order(WEIGHT)
    assert (reason or "").startswith(f"products of {split} and 514 rows" if split else "")
    assert (reason is None) == (split == 0)


@pytest.mark.parametrize("num_terms", [2, 7, 128])
def test_every_sum_is_zero_but_for_rounding(num_terms: int) -> None:
    x, weight = order.cancelling_product(5, torch.zeros(4, num_terms, dtype=torch.bfloat16))
    assert x.shape == (5, num_terms) and weight.shape == (4, num_terms)
    assert x.count_nonzero() >= 5 * (num_terms - 1)
    assert torch.equal(x.double() @ weight.double().t(), torch.zeros(5, 4, dtype=torch.float64))
