"""Reports of log-probabilities against sorting in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from hybridspec.speculate import ChoiceRule, LogitEdits, choose_and_report, report_logprobs


def rule(num_logprobs: int | None, **options: object) -> ChoiceRule:
    return ChoiceRule(
        temperature=0, top_k=0, top_p=1, min_p=0, seed=0, num_logprobs=num_logprobs, **options
    )


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


def test_only_rows_that_ask_and_before_any_edit() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    raw = logits.clone()
    edits = LogitEdits([0], bias={5: 50.0})
    rules = [rule(None), rule(1, edits=edits), rule(0)]
    tokens, reports = choose_and_report(logits, rules, [1, 1, 1], [[]] * 3)
    assert reports[0] is None
    assert tokens[1] == 5
    for found, expected in zip(
        reports[1:], report_logprobs(raw[1:], tokens[1:], [1, 0]), strict=True
    ):
        assert [(token, one.rank) for token, one in found.items()] == [
            (token, one.rank) for token, one in expected.items()
        ]
        values = [[one.logprob for one in report.values()] for report in (found, expected)]
        assert values[0] == pytest.approx(values[1], abs=1e-5)
    assert not torch.equal(logits[1], raw[1])  # the report did not come from what was edited
    assert choose_and_report(raw, [rule(None)] * 3, [1] * 3, [[]] * 3)[1] == [None] * 3
