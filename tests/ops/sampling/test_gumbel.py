"""The noise is a pure function of (seed, position, token), from the published generator."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridspec.ops.sampling import gumbel_noise, philox

MASK = 0xFFFFFFFF


def signed(seed: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit seed."""
    return seed - (1 << 64) if seed >> 63 else seed


def philox_plain(seed: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in Python integers, which never wrap."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def words_of(seed: int, counter: tuple[int, int, int, int]) -> list[int]:
    columns = tuple(torch.tensor([[word]]) for word in counter)
    return philox(torch.tensor([signed(seed)]), columns).flatten().tolist()


# Known answers that the generator's authors publish with it: counter, key, output.
KNOWN = [
    (
        (0, 0, 0, 0),
        0,
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
    ),
    (
        (MASK, MASK, MASK, MASK),
        0xFFFFFFFFFFFFFFFF,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "seed", "expected"), KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers(counter: tuple[int, int, int, int], seed: int, expected: list[int]) -> None:
    assert words_of(seed, counter) == expected
    assert list(philox_plain(seed, counter)) == expected


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    counter=st.tuples(*[st.integers(0, MASK)] * 4),
)
def test_equals_the_generator_in_unbounded_integers(
    seed: int, counter: tuple[int, int, int, int]
) -> None:
    assert words_of(seed, counter) == list(philox_plain(seed, counter))


def noise_plain(seed: int, position: int, token: int) -> float:
    word = philox_plain(seed, (token // 4, position, 0, 0))[token % 4]
    return -math.log(-math.log((word + 0.5) / 2**32))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, MASK)), min_size=1, max_size=4
    ),
    token=st.integers(0, 272),
)
def test_noise_of_one_token(rows: list[tuple[int, int]], token: int) -> None:
    seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    noise = gumbel_noise(seeds, positions, 273)
    expected = [noise_plain(seed, position, token) for seed, position in rows]
    torch.testing.assert_close(
        noise[:, token], torch.tensor(expected, dtype=torch.float32), rtol=1e-7, atol=1e-7
    )


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    order=st.permutations(range(6)),
    count=st.integers(1, 6),
    vocab=st.sampled_from([1, 3, 4, 5, 64, 271, 272]),
)
def test_same_bits_in_any_batch_and_vocabulary(order: list[int], count: int, vocab: int) -> None:
    seeds = torch.tensor([0, 1, -1, 2**40, 5, 5])
    positions = torch.tensor([0, 7, 7, 3, 100_000, 2**31])
    whole = gumbel_noise(seeds, positions, 272)
    chosen = torch.tensor(order[:count])
    part = gumbel_noise(seeds[chosen], positions[chosen], vocab)
    assert torch.equal(part, whole[chosen, :vocab])


def test_range_of_the_noise() -> None:
    noise = gumbel_noise(torch.arange(200), torch.arange(200), 5000)
    assert noise.dtype == torch.float32 and noise.shape == (200, 5000)
    assert noise.isfinite().all()
    # The most extreme words give the documented bounds.
    least = -math.log(-math.log(0.5 / 2**32))
    most = -math.log(-math.log(1 - 0.5 / 2**32))
    assert -3.2 < least <= noise.min() and noise.max() <= most < 22.9


def ks_distance(values: Tensor) -> float:
    """Greatest distance between the empirical and the Gumbel distribution function."""
    ordered = values.double().sort().values
    expected = torch.exp(-torch.exp(-ordered))
    steps = torch.arange(len(ordered) + 1, dtype=torch.float64) / len(ordered)
    return max((steps[1:] - expected).max().item(), (expected - steps[:-1]).max().item())


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_distribution_along_each_argument(axis: str) -> None:
    many = torch.arange(20_000)
    fixed = torch.full_like(many, 3)
    values = {
        "seed": lambda: gumbel_noise(many, fixed, 2)[:, 1],
        "position": lambda: gumbel_noise(fixed, many, 2)[:, 1],
        "token": lambda: gumbel_noise(fixed[:1], fixed[:1], 20_000)[0],
    }[axis]()
    # 1.95 / sqrt(n) is the Kolmogorov-Smirnov bound at 0.1 %.
    assert ks_distance(values) < 1.95 / math.sqrt(20_000)
    assert ks_distance(values * 1.05) > 1.95 / math.sqrt(20_000)


def test_wrong_calls() -> None:
    seeds = torch.arange(3)
    with pytest.raises(ValueError, match="positions: expected shape"):
        gumbel_noise(seeds, seeds[:2], 5)
    with pytest.raises(TypeError, match="seeds: expected dtype int64"):
        gumbel_noise(seeds.int(), seeds, 5)
    with pytest.raises(ValueError, match="vocab_size"):
        gumbel_noise(seeds, seeds, 0)


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert gumbel_noise(none, none, 5).shape == (0, 5)
