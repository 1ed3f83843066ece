"""The kernels that choose tokens against the CPU's backend, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from helpers.choice_cases import FILTER_KINDS, ChoiceCase, filter_case, random_case
from helpers.thinned import thinned
from hybridspec.ops.sampling import NO_TOKEN, SamplingUses, launch, triton_rows
from hybridspec.ops.sampling.call import Rows, Text
from hybridspec.ops.sampling.mass import TILE

pytestmark = pytest.mark.interpreted

CONFIGS = {
    "tile by tile": launch.LaunchConfig(tiles_per_program=1, num_splits=2, num_warps=4),
    "two tiles": launch.LaunchConfig(tiles_per_program=2, num_splits=1, num_warps=4),
    "row by row": launch.LaunchConfig(tiles_per_program=100, num_splits=4, num_warps=4),
}


def run_kernels(
    case: ChoiceCase,
    config: launch.LaunchConfig | None = None,
    uses: SamplingUses | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.full_like(case.slots, -77, dtype=torch.int64)
    rows = Rows(case.slots, case.offsets, mask)
    text = Text(case.seq_len, case.drafts, case.token_pages, case.page_table)
    uses = uses or SamplingUses.everything()
    launch.choose(case.logits.clone(), rows, case.table, text, uses, out, config)
    return out


@pytest.mark.parametrize(
    "seed", [0, 1, 2, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 8))]
)
def test_all_options(seed: int) -> None:
    case = random_case(seed, slots=4, drafts=seed % 4)
    expected = case.choose()
    assert torch.equal(run_kernels(case), expected)
    assert torch.equal(run_kernels(case, uses=case.uses()), expected)


def test_all_options_in_many_tiles() -> None:
    case = random_case(3, vocab=2 * TILE + 77, slots=3, drafts=1)
    assert torch.equal(run_kernels(case, CONFIGS["tile by tile"]), case.choose())


@pytest.mark.parametrize(("kind", "name"), thinned(FILTER_KINDS, list(CONFIGS)))
def test_filters(kind: str, name: str) -> None:
    config = CONFIGS[name]
    seed = config.num_splits
    spread = (0.5, 2.0, 12.0)[(FILTER_KINDS.index(kind) + seed) % 3]
    case = filter_case(seed, kind, num_rows=3, vocab=2 * TILE + 500, spread=spread)
    uses = SamplingUses(has_noise=True, has_filters=True)
    assert torch.equal(run_kernels(case, config, uses), case.choose(uses=uses))


@pytest.mark.parametrize("vocab", [1, 2, 5, 17, 255, TILE, TILE + 1])
def test_sizes(vocab: int) -> None:
    case = filter_case(vocab, "top_k and top_p", num_rows=3, vocab=vocab, spread=2.0)
    assert torch.equal(run_kernels(case), case.choose())


def test_ties() -> None:
    """Few different logits, so that ties are everywhere, at the border of each filter too."""
    for kind in FILTER_KINDS:
        case = filter_case(7, kind, num_rows=6, vocab=300, spread=1.0)
        case.logits.mul_(2).round_().div_(2)
        assert torch.equal(run_kernels(case), case.choose())


@pytest.mark.parametrize("kind", FILTER_KINDS)
def test_rows_that_are_settled_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick sums are never believed, and every list is too long."""
    monkeypatch.setattr(triton_rows, "MARGIN", tl.constexpr(2.0))
    monkeypatch.setattr(launch, "_LIST", 1)
    for seed, spread in ((1, 0.5), (2, 4.0)):
        case = filter_case(seed, kind, num_rows=5, vocab=TILE + 300, spread=spread)
        case.logits[3:].mul_(2).round_().div_(2)
        assert torch.equal(run_kernels(case), case.choose())


def test_drops_one_after_the_other() -> None:
    """Where hardly anything is kept, more winners are dropped than are weighed at once."""
    case = filter_case(5, "top_p", num_rows=5, vocab=TILE + 300, spread=0.7)
    case.table.temperature.fill_(1.0)
    case.table.top_p.fill_(0.02)
    assert torch.equal(run_kernels(case), case.choose())


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 0.8])
def test_nothing_is_chosen(temperature: float) -> None:
    case = filter_case(1, "top_p", num_rows=9, vocab=TILE + 300, spread=3.0)
    case.table.temperature.fill_(temperature)
    case.logits[0, 7] = torch.nan
    case.logits[1, TILE + 7] = torch.inf
    case.logits[2] = -torch.inf
    case.logits[3, :TILE] = -torch.inf
    case.logits[4, TILE:] = -torch.inf
    case.logits[5, 1:] = -torch.inf
    case.slots[6] = -1
    case.table.allowed_bits[case.slots[7]] = 0
    case.table.allowed_bits[case.slots[8], 5] = 0
    case.logits[8, 170] = torch.nan
    expected = case.choose()
    assert expected[[0, 1, 2, 6, 7, 8]].tolist() == [NO_TOKEN] * 6
    assert (expected[3:6] >= 0).all()
    assert torch.equal(run_kernels(case), expected)
    mask = torch.zeros(9, case.table.end_bits.shape[1], dtype=torch.int32)
    mask[3, 66] = -(2**31)
    expected = case.choose(mask=mask)
    assert expected[3] == 66 * 32 + 31
    assert torch.equal(run_kernels(case, mask=mask), expected)


def test_public_call() -> None:
    case = random_case(4, slots=2, drafts=1)
    expected = case.choose()
    assert torch.equal(case.choose(backend="triton"), expected)
