"""Forced acceptance: the requested rates, from draws that are independent of each other."""

from __future__ import annotations

import pytest
import torch

from hybridspec import LLM, SamplingParams
from hybridspec.engine.outputs import acceptance_by_position
from hybridspec.speculate import ForcedAcceptance

SLOTS, POSITIONS = 40, 2500


def forced_by(rates: list[float], spread: float = 0.0) -> ForcedAcceptance:
    return ForcedAcceptance.of(rates, spread, torch.device("cpu"))


def stands(confidence: torch.Tensor) -> torch.Tensor:
    """Whether force accepts a draft of each slot and position, [SLOTS, POSITIONS]."""
    slots = torch.arange(SLOTS, dtype=torch.int32).repeat_interleave(POSITIONS)
    positions = torch.arange(POSITIONS).repeat(SLOTS)
    fed = torch.zeros(SLOTS * POSITIONS, dtype=torch.int64)
    forced = forced_by([0.5])
    # The draft of every row is 0, and 7 is what the target chose.
    chosen = forced.judge(fed + 7, fed, slots, positions, confidence.flatten(), 250)
    assert set(chosen.tolist()) <= {0, 7}
    other = forced.judge(fed, fed, slots, positions, confidence.flatten(), 250)
    assert torch.equal(other == 0, chosen == 0)
    return (chosen == 0).view(SLOTS, POSITIONS)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.85, 1.0])
def test_the_rate(rate: float) -> None:
    found = stands(torch.full((SLOTS, POSITIONS), rate)).float()
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(found.mean() - rate) <= 4 * deviation / found.numel() ** 0.5
    assert (found.mean(1) - rate).abs().max() <= 5 * deviation / POSITIONS**0.5
    assert (found.mean(0) - rate).abs().max() <= 5.5 * deviation / SLOTS**0.5


def test_draws_are_independent() -> None:
    found = stands(torch.full((SLOTS, POSITIONS), 0.5)).float() - 0.5
    bound = 5 * 0.25 / found.numel() ** 0.5
    for lag in (1, 2, 3, 4, 64):
        assert (found[:, lag:] * found[:, :-lag]).mean().abs() < bound
        assert (found * found.roll(lag, 0)).mean().abs() < bound


def test_confidences() -> None:
    slots, positions = torch.arange(SLOTS)[:, None], torch.arange(POSITIONS)[None]
    forced = forced_by([0.85, 0.3], 0.25)
    found = forced.confidences(slots, positions)
    assert (found[:, 0] >= 0.6).all() and (found[:, 0] <= 1).all() and found[:, 0].max() > 0.99
    assert abs(found[:, 1:].mean() - 0.3) < 0.003
    assert found[:, 1:].min() < 0.051 and found[:, 1:].max() > 0.549
    plain = forced_by([0.85, 0.3]).confidences(slots, positions[:, :3])
    assert torch.equal(plain, torch.tensor([0.85, 0.3, 0.3]).expand(SLOTS, 3))
    # A draft is accepted with its own confidence, which is drawn apart.
    draws = (found[:, 1:] - 0.3) / 0.5
    is_accepted = stands(torch.full((SLOTS, POSITIONS), 0.5))[:, 1:].float()
    assert ((is_accepted - 0.5) * draws).mean().abs() < 0.003


def test_nothing_chosen_is_accepted() -> None:
    forced = forced_by([1.0])
    row = torch.zeros(1, dtype=torch.int64)
    assert forced.judge(row - 1, row, row.int(), row, torch.ones(1), 250).tolist() == [-1]


def test_the_engine_accepts_as_often_as_was_asked() -> None:
    llm = LLM("bundled", draft_tokens=3, acceptance=[0.9, 0.4], max_model_len=512)
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    outputs = llm.generate(["Once upon a time"] * 6, params)
    rates = acceptance_by_position([output.stats for output in outputs])
    assert rates == pytest.approx([0.9, 0.9 * 0.4, 0.9 * 0.4 * 0.4], abs=0.06)
