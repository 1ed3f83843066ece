"""Which drafts a row budget goes to, from confidences as drafters report them."""

from __future__ import annotations

import math

import pytest
import torch

from hybridspec.speculate import Draft, plan_drafts

CPU = torch.device("cpu")


def planned(drafts: list[tuple[int, list[float]]], num_rows: int) -> list[int]:
    """Plan drafts given as (number of tokens, confidences)."""
    return plan_drafts([Draft([7] * count, some) for count, some in drafts], num_rows, CPU)


def test_the_likeliest_prefixes_are_verified() -> None:
    drafts = [(3, [0.9, 0.5, 0.9]), (2, [0.6, 0.1]), (0, []), (1, [0.7])]
    # survival 0.9, 0.45, 0.405; 0.6, 0.06; 0.7 - and row 0 of each request
    assert planned(drafts, 4) == [0, 0, 0, 0]
    assert planned(drafts, 5) == [1, 0, 0, 0]
    assert planned(drafts, 6) == [1, 0, 0, 1]
    assert planned(drafts, 8) == [2, 1, 0, 1]
    assert planned(drafts, 99) == [3, 2, 0, 1]
    assert planned(drafts, 1) == [0, 0, 0, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0, 1.0])
def test_confidences_that_are_no_probabilities(value: float) -> None:
    drafts = [(2, [value, value]), (2, [0.5, value])]
    for num_rows in range(9):
        counts = planned(drafts, num_rows)
        assert all(0 <= count <= 2 for count in counts)
        assert sum(counts) == min(max(num_rows - 2, 0), 4)


def test_more_or_fewer_confidences_than_drafts() -> None:
    """One of the token after the last draft changes nothing; one that is missing is 0."""
    exact = [(2, [0.9, 0.2]), (1, [0.5])]
    for drafts in (
        [(2, [0.9, 0.2, 0.99]), (1, [0.5])],
        [(2, [0.9, 0.2]), (1, [0.5, 0.99])],
        [(2, [0.9, 0.2, 0.99]), (1, [0.5, 0.99])],
        [(2, [0.9, 0.2]), (1, [0.5, 0.99, 0.99])],
        [(2, [0.9]), (1, [0.5])],
    ):
        for num_rows in range(2, 7):
            assert planned(drafts, num_rows) == planned(exact, num_rows)
