"""Temperature and filters: against plain Python, and by statistics over seeds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.chi_square import chi_square_p_value
from helpers.plain_choice import choose_plain

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def kept_plain(x: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """The tokens that the filters keep, in fp64 and one token at a time."""
    largest, order = max(x), sorted(x, reverse=True)
    least = order[min(top_k or len(x), len(x)) - 1]
    weights = [math.exp(value - largest) if value >= least else 0.0 for value in x]
    total = sum(weights)
    kept = []
    for i, weight in enumerate(weights):
        above = sum(other for other in weights if other > weight)
        is_in = above < top_p * total or weight == 1.0
        if weight and is_in and weight >= min_p:
            kept.append(i)
    return kept


def choose_often(x: list[float], temperature: float, count: int, **filters: float) -> Tensor:
    """How often each token is chosen over seeds."""
    columns = {name: torch.full((count,), value) for name, value in filters.items()}
    logits = torch.tensor(x).expand(count, len(x))
    tokens = choose_plain(
        logits, torch.full((count,), temperature), positions=torch.full((count,), 12), **columns
    )
    return tokens.bincount(minlength=len(x))


# Multiples of 1/4 keep ties exact; odd thresholds keep sums away from the limits.
filters = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([0, 1, 2, 3, 6, 7, 50]),
        "top_p": st.sampled_from([1.0, 0.9037, 0.5011, 0.1234, 0.0]),
        "min_p": st.sampled_from([0.0, 0.0511, 0.3017, 0.9973, 1.0]),
    }
)


@settings(derandomize=True, max_examples=120, deadline=None)
@given(
    x=st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=7, max_size=7),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    chosen=filters,
)
def test_filters_equal_plain_python(
    x: list[float], temperature: float, chosen: dict[str, float]
) -> None:
    """Only what is kept is chosen, and all of it that is not rare."""
    counts = choose_often(x, temperature, 400, **chosen)
    scaled = [value / temperature for value in x]
    kept = kept_plain(scaled, **chosen)
    assert set(counts.nonzero().flatten().tolist()) <= set(kept)
    total = sum(math.exp(scaled[i]) for i in kept)
    assert all(counts[i] > 0 for i in kept if math.exp(scaled[i]) > 0.05 * total)


@pytest.mark.parametrize(
    "chosen",
    [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 6, "top_p": 0.9, "min_p": 0.02}],
    ids=["none", "top_k", "top_p", "min_p", "all"],
)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_distribution(temperature: float, chosen: dict[str, float]) -> None:
    x = [2.0, 1.5, 1.0, 0.5, 0.25, 0.0, -0.5, -1.0]
    scaled = [value / temperature for value in x]
    kept = kept_plain(scaled, **{**OFF, **chosen})
    probs = torch.tensor([math.exp(v) if i in kept else 0.0 for i, v in enumerate(scaled)])
    assert chi_square_p_value(choose_often(x, temperature, 20_000, **chosen), probs) > 1e-3
    # The test sees a temperature that is wrong by a fifth.
    wrong = choose_often(x, temperature * 1.2, 20_000, **chosen)
    assert chi_square_p_value(wrong, probs) < 1e-9


def test_noise_follows_seed_and_position() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).expand(64, 50)
    ones, places, seeds = torch.ones(64), torch.arange(64) + 1, torch.full((64,), 7)
    first = choose_plain(logits, ones, seeds=seeds, positions=places)
    assert torch.equal(first, choose_plain(logits, ones, seeds=seeds, positions=places))
    for changed in ({"seeds": seeds + 1}, {"positions": places + 1}):
        other = choose_plain(logits, ones, **{"seeds": seeds, "positions": places, **changed})
        assert not torch.equal(first, other)
    assert first.unique().numel() > 5


def test_extreme_inputs() -> None:
    logits = torch.tensor(
        [[3e38, -3e38, 0.0], [-torch.inf, 1.0, -torch.inf], [1e4, 1e4 - 1, 0.0], [3e38, 2e38, 0.0]]
    )
    tokens = choose_plain(
        logits,
        torch.tensor([1.0, 1.0, 1e-6, 1e-45]),
        top_k=torch.tensor([3, 0, 0, 0]),
        top_p=torch.tensor([0.9, 1.0, 1.0, 0.5]),
        min_p=torch.tensor([0.0, 0.0, 0.1, 0.1]),
    )
    assert tokens.tolist() == [0, 1, 0, 0]
