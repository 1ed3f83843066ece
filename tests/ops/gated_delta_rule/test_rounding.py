"""Stochastic rounding of folds: between neighbours, reproducible, unbiased, in every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.gdn_cases import Case, Dtypes, Geometry, VerifyCall, assert_same_bits
from helpers.gdn_oracle import window_state
from hybridspec.compat import flashinfer
from hybridspec.errors import UnsupportedError
from hybridspec.ops.gated_delta_rule.rounding import ROUNDED, fold_words, round_by_chance

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SMALL = Geometry(heads=1, value_heads=2, key_dim=16, value_dim=16, num_slots=100)
FEW = replace(SMALL, num_slots=3)
interpreted = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]
BACKENDS = ["reference", pytest.param("triton", marks=interpreted)]
VALUES = (1.0, 1.001, -3.7, 0.3, 6.0e-5, 2.1e-5, -1.3e-7, 0.0, 1000.4, -65503.0)


def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the numbers of a dtype on both sides of x, and x itself twice where it is one."""
    near = x.to(dtype)
    down, up = (near.nextafter(torch.full_like(near, end)) for end in (-torch.inf, torch.inf))
    below = torch.where(near.double() > x.double(), down, near)
    above = torch.where(near.double() < x.double(), up, near)
    return below.double(), above.double()


def score(found: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how many deviations sums over the first dimension are off, if rounded by chance."""
    below, above = neighbours(exact.float(), dtype)
    gap = (above - below).clamp_min(1e-300)
    share = (exact.double() - below) / gap
    deviation = (share * (1 - share)).sqrt() * gap * found.shape[0] ** 0.5
    return (found.double() - exact.double()).sum(0) / deviation.clamp_min(1e-300)


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_of_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor(VALUES)
    words = torch.cat(
        [fold_words(torch.tensor([seed]), 3, 5, (1000, len(VALUES))) for seed in range(10)]
    )
    found = round_by_chance(x.expand_as(words), words, dtype)
    below, above = neighbours(x, dtype)
    assert bool(((found.double() == below) | (found.double() == above)).all())
    off = score(found, x, dtype)
    assert off.abs().max() < 4
    assert abs(off.sum()) < 3 * (off != 0).sum() ** 0.5
    exact = x.to(dtype).float()
    assert_same_bits(round_by_chance(exact.expand_as(words), words, dtype)[7], exact.to(dtype))
    others = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38])
    assert_same_bits(round_by_chance(others, words[0, :4], dtype)[:3], others.to(dtype)[:3])


class Folds:
    """Slots with the same state and the same window, which all fold."""

    def __init__(self, dtype: torch.dtype, geometry: Geometry) -> None:
        count = geometry.num_slots
        self.call = VerifyCall(
            Case(
                "folds",
                (1,) * count,
                (6,) * count,
                (29,) * count,
                folds=(True,) * count,
                geometry=geometry,
                dtypes=Dtypes(F32, dtype, F32),
            )  # fmt: skip
        )
        pools = self.call.pools
        for pool in (pools.state, *pools.ring[:3]):
            pool.copy_(pool[:1].expand_as(pool).clone())
        self.before = pools.state.clone()
        self.exact = window_state(pools.state[0], *pools.window(0))

    def run(self, seed: int | None, backend: str = "reference") -> Tensor:
        self.call.pools.state.copy_(self.before)
        rand_seed = None if seed is None else torch.tensor([seed])
        self.call.run(backend, rand_seed=rand_seed)
        return self.call.pools.state.clone()


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_unbiased_over_thousands_of_folds(dtype: torch.dtype, count: int) -> None:
    folds = Folds(dtype, SMALL)
    rounds = count // SMALL.num_slots
    found = torch.cat([folds.run(seed) for seed in range(rounds)])
    # What the op rounds is the fp32 result, which is nearer to the exact one than a draw can tell.
    off = score(found, folds.exact, dtype)
    assert abs(off.mean()) < 3 / off.numel() ** 0.5
    assert abs(off.square().mean() - 1) < 0.2
    to_nearest = score(folds.run(None).repeat(rounds, 1, 1, 1), folds.exact, dtype)
    assert to_nearest.square().mean() > count / 20  # so the test would see a bias


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_a_function_of_seed_slot_and_element(dtype: torch.dtype, backend: str) -> None:
    folds = Folds(dtype, FEW)
    one, same, other = (folds.run(seed, backend) for seed in (7, 7, 2**40 + 7))
    assert_same_bits(one, same)
    assert (one != other).double().mean() > 0.2
    assert (one[0] != one[1]).double().mean() > 0.2
    assert (one[0, 0] != one[0, 1]).any()
    # The same bits of chance on the same sums, up to the order in which these are added up.
    assert (one != folds.run(7)).double().mean() < 0.01


def test_of_the_fold_alone() -> None:
    """Nothing but the state of a folding request is drawn for."""
    dtypes = Dtypes(F32, BF16, F32)
    case = Case("some", (3, 2), (14, 5), (29, 3), geometry=SMALL, dtypes=dtypes)
    usual, drawn = VerifyCall(case), VerifyCall(case)
    assert usual.folds == (True, False)
    seed = torch.tensor([3])
    assert_same_bits(drawn.run(rand_seed=seed), usual.run())
    for mine, other in zip(drawn.pools.tensors()[1:], usual.pools.tensors()[1:], strict=True):
        assert_same_bits(mine, other)
    folding, other = drawn.slots
    assert (drawn.pools.state[folding] != usual.pools.state[folding]).any()
    assert_same_bits(drawn.pools.state[other], usual.pools.state[other])


def test_what_is_refused() -> None:
    call = VerifyCall(Case("wide", (3,), (14,), geometry=SMALL, dtypes=Dtypes(F32, F32, F32)))
    with pytest.raises(TypeError, match="rand_seed: expected None with a state of float32"):
        call.run(rand_seed=torch.tensor([3]))
    call = VerifyCall(Case("narrow", (3,), (14,), geometry=SMALL, dtypes=Dtypes(F32, BF16, F32)))
    with pytest.raises(TypeError, match="rand_seed: expected dtype int64"):
        call.run(rand_seed=torch.tensor([3], dtype=torch.int32))
    with pytest.raises(ValueError, match="rand_seed: expected shape"):
        call.run(rand_seed=torch.tensor(3))
    with pytest.raises(UnsupportedError):
        call.run("cuda", rand_seed=torch.tensor([3]))


def flush(state: Tensor, **options: object) -> Tensor:
    """Flush one window of FlashInfer's into a state, and return that."""
    generator = torch.Generator().manual_seed(1)
    T, H, HV, K, V = 2, 1, 2, 16, 16

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    state = state.clone()
    flashinfer.gated_delta_rule_mtp_ucache_flush(
        A_log=torch.zeros(HV), a=normal(1, T, HV), dt_bias=torch.zeros(HV), q=normal(1, T, H, K),
        k=normal(1, T, H, K), v=normal(1, T, HV, V), b=normal(1, T, HV),
        initial_state_source=state, k_cache=normal(1, H, 32, K), u_cache=normal(1, HV, 32, V),
        g_cache=-normal(1, HV, 32).abs().cumsum(2), hist_len=torch.tensor([15], dtype=torch.int32),
        cache_base=torch.tensor([9], dtype=torch.int32), **options,
    )  # fmt: skip
    return state


def test_of_flashinfers_callers() -> None:
    state = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(2)).to(BF16)
    usual = flush(state)
    assert_same_bits(flush(state, rand_seed=3), usual)  # looked at where it is asked for alone
    drawn = flush(state, stochastic_rounding=True, rand_seed=3)
    assert (drawn != usual).any()
    assert_same_bits(flush(state, stochastic_rounding=True, rand_seed=torch.tensor(3)), drawn)
    assert (flush(state, stochastic_rounding=True, rand_seed=4) != drawn).any()
    for wrong in (None, "3", torch.tensor([3, 4])):
        with pytest.raises(flashinfer.CallerError, match="rand_seed"):
            flush(state, stochastic_rounding=True, rand_seed=wrong)
    with pytest.raises(flashinfer.CallerError, match="rand_seed: expected None with a state"):
        flush(state.float(), stochastic_rounding=True, rand_seed=3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_the_compiled_kernel_draws_what_the_reference_draws(dtype: torch.dtype) -> None:
    dtypes = Dtypes(F32, dtype, F32)
    case = Case("device", (4, 4), (14, 15), (29, 3), geometry=SMALL, dtypes=dtypes)
    mine, other = VerifyCall(case, "cuda"), VerifyCall(case)
    mine.run(rand_seed=torch.tensor([11], device="cuda"))
    other.run(rand_seed=torch.tensor([11]))
    for slot in other.slots:
        found, expected = mine.pools.state[slot].cpu(), other.pools.state[slot]
        assert (found != expected).double().mean() < 0.01
