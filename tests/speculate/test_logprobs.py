"""Reports of log-probabilities against sorting in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from hybridspec.speculate import report_logprobs


def test_numbers_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]]))
    first, second = report_logprobs(logits, [1, 1], [2, 0])
    assert list(first) == [1, 0, 2]
    assert [found.rank for found in first.values()] == [3, 1, 2]
    assert [math.exp(found.logprob) for found in first.values()] == pytest.approx([0.2, 0.5, 0.3])
    assert list(second) == [1]
    assert second[1].rank == 1


@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_rows_against_sorting(count: int) -> None:
    logits = 4 * torch.randn(9, 40, generator=torch.Generator().manual_seed(count))
    tokens = list(range(0, 36, 4))
    for row, token, report in zip(
        logits, tokens, report_logprobs(logits, tokens, [count] * 9), strict=True
    ):
        expected = torch.log_softmax(row.double(), -1)
        order = sorted(range(40), key=lambda other: -float(row[other]))
        assert list(report) == list(dict.fromkeys([token, *order[:count]]))
        for other, found in report.items():
            assert found.logprob == pytest.approx(float(expected[other]), abs=1e-5)
            assert found.rank == order.index(other) + 1


def test_equal_logits_share_a_rank_from_above() -> None:
    [report] = report_logprobs(torch.zeros(1, 4), [2], [0])
    assert report[2].rank == 1
