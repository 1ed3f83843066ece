"""Filters and selection: against plain Python, against transformers, and by statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process

from helpers.chi_square import chi_square_p_value
from hybridspec.ops.sampling import gumbel_noise, process_logits, sample


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def kept_plain(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """The tokens that the filters keep, in fp64 and one token at a time."""
    x = [value / (temperature or 1.0) for value in logits]
    largest = max(x)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    kept = order
    if top_k:
        kept = [i for i in order if x[i] >= x[order[min(top_k, len(x)) - 1]]]
    weights = {i: math.exp(x[i] - largest) for i in kept}
    total = sum(weights.values())
    nucleus, mass = [], 0.0
    for i in kept:
        if nucleus and mass / total >= top_p:
            break
        nucleus.append(i)
        mass += weights[i]
    return {i for i in nucleus if weights[i] >= min_p * weights[order[0]]}


# Multiples of 1/4 keep ties exact; odd thresholds keep sums away from the limits.
row = st.tuples(
    st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=7, max_size=7),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 3, 6, 7, 50]),
    st.sampled_from([1.0, 0.9037, 0.5011, 0.1234, 0.0]),
    st.sampled_from([0.0, 0.0511, 0.3017, 0.9973, 1.0]),
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(rows=st.lists(row, min_size=1, max_size=4))
def test_filters_equal_plain_python(rows: list) -> None:
    logits, temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    x = process_logits(
        column(*logits), column(*temperature), integers(*top_k), column(*top_p), column(*min_p)
    )
    for i, arguments in enumerate(rows):
        kept = set(torch.nonzero(x[i] > -torch.inf).flatten().tolist())
        assert kept == kept_plain(*arguments)
    assert x.amax(-1).eq(0).all()


@pytest.mark.parametrize("top_k", [0, 5, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_filters_equal_transformers(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * 3
    expected = logits_process.TemperatureLogitsWarper(0.7)(None, logits)
    if top_k:
        expected = logits_process.TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = logits_process.TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = logits_process.MinPLogitsWarper(min_p)(None, expected)
    ones = torch.ones(16)
    x = process_logits(logits, ones * 0.7, ones.int() * top_k, ones * top_p, ones * min_p)
    torch.testing.assert_close(x.softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-7)
    assert torch.equal(x > -torch.inf, expected > -torch.inf)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = column([1.0, 5.0, 5.0, 2.0], [3.0, 3.0, 3.0, 3.0], [-1.0, 0.0, 7.0, 7.0])
    zeros = torch.zeros(3)
    expected = [1, 0, 2]
    assert sample(logits, zeros, None, None, None, None).tolist() == expected
    # The same rows beside a random one, with filters on and noise at hand.
    noise = gumbel_noise(torch.arange(4), torch.arange(4), 4)
    both = torch.cat([logits, logits[:1]])
    mixed = sample(
        both,
        column(0, 0, 0, 1),
        integers(2, 1, 3, 4),
        column(0.2, 0.5, 0.9, 1),
        column(0.5, 1, 0, 0),
        noise,
    )
    assert mixed[:3].tolist() == expected


@settings(derandomize=True, max_examples=50, deadline=None)
@given(data=st.data(), count=st.integers(2, 6))
def test_rows_do_not_influence_each_other(data: st.DataObject, count: int) -> None:
    rows = [data.draw(row) for _ in range(count)]
    logits, temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    arguments = (
        column(*logits), column(*temperature), integers(*top_k), column(*top_p), column(*min_p),
    )  # fmt: skip
    noise = gumbel_noise(torch.arange(count), torch.arange(count) + 9, 7)
    together = sample(*arguments, noise)
    alone = [
        sample(*(a[i : i + 1] for a in arguments), noise[i : i + 1]).item() for i in range(count)
    ]
    assert together.tolist() == alone


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (None, None, None),
        (0, 1.0, 0.0),
        (4, 1.0, 0.0),
        (0, 0.8, 0.0),
        (0, 1.0, 0.1),
        (6, 0.9, 0.02),
    ],
    ids=["none", "off", "top_k", "top_p", "min_p", "all"],
)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_sampled_distribution(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    count = 20_000
    logits = column(2.0, 1.5, 1.0, 0.5, 0.25, 0.0, -0.5, -1.0).expand(count, 8)
    filters = [
        None if value is None else torch.full((count,), value, dtype=dtype)
        for value, dtype in ((top_k, torch.int32), (top_p, torch.float32), (min_p, torch.float32))
    ]
    noise = gumbel_noise(torch.arange(count), torch.full((count,), 11), 8)
    tokens = sample(logits, torch.full((count,), temperature), *filters, noise)
    x = (logits[0].double() / temperature).tolist()
    kept = kept_plain(x, 1.0, top_k or 0, 1.0 if top_p is None else top_p, min_p or 0.0)
    probs = torch.tensor([math.exp(v) if i in kept else 0.0 for i, v in enumerate(x)])
    assert chi_square_p_value(tokens.bincount(minlength=8), probs) > 1e-3
    # The test sees a temperature that is wrong by a fifth.
    wrong = sample(logits, torch.full((count,), temperature * 1.2), *filters, noise)
    assert chi_square_p_value(wrong.bincount(minlength=8), probs) < 1e-9


def test_noise_follows_the_seed() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).expand(64, 50)
    ones, positions = torch.ones(64), torch.arange(64)
    seeds = torch.full((64,), 7)
    first = sample(logits, ones, None, None, None, gumbel_noise(seeds, positions, 50))
    again = sample(logits, ones, None, None, None, gumbel_noise(seeds, positions, 50))
    other = sample(logits, ones, None, None, None, gumbel_noise(seeds + 1, positions, 50))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.unique().numel() > 5


def test_extreme_inputs_stay_numbers() -> None:
    logits = column([3e38, -3e38, 0.0], [-torch.inf, 1.0, -torch.inf], [1e4, 1e4 - 1, 0.0])
    temperature = column(1.0, 1.0, 1e-6)
    noise = gumbel_noise(torch.arange(3), torch.arange(3), 3)
    tokens = sample(
        logits, temperature, integers(3, 0, 0), column(0.9, 1, 1), column(0, 0, 0.1), noise
    )
    assert tokens.tolist() == [0, 1, 0]
    half = sample(logits.clamp(-1e4, 1e4).half(), temperature * 0, None, None, None, None)
    assert half.tolist() == [0, 1, 0]


def test_wrong_calls() -> None:
    logits, ones = torch.zeros(2, 4), torch.ones(2)
    with pytest.raises(ValueError, match="noise: expected a tensor"):
        sample(logits, ones, None, None, None, None)
    with pytest.raises(ValueError, match="noise: expected shape"):
        sample(logits, ones, None, None, None, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="top_p: expected shape"):
        sample(logits, ones, None, torch.ones(3), None, torch.zeros(2, 4))
    with pytest.raises(TypeError, match="noise: expected dtype float32"):
        sample(logits, ones, None, None, None, torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="temperature: expected shape"):
        sample(logits, torch.ones(3), None, None, None, None)
    with pytest.raises(TypeError, match=r"logits: expected a tensor \[N V\]"):
        process_logits(None, ones)
    with pytest.raises(ValueError, match="top_k: expected shape"):
        process_logits(logits, ones, torch.ones(3, dtype=torch.int32))
