"""Choosing tokens on a CUDA device: the CPU's tokens, in a graph, for many rows."""

from __future__ import annotations

import pytest
import torch

from helpers.choice_cases import FILTER_KINDS, filter_case, random_case
from helpers.no_sync import no_sync
from hybridspec.ops.sampling import SamplingTable, SamplingUses, choose, launch
from hybridspec.ops.sampling.call import Rows, Text
from hybridspec.ops.sampling.mass import TILE

pytestmark = pytest.mark.gpu

FILTERED = SamplingUses(has_noise=True, has_filters=True)


def test_all_options() -> None:
    for seed in range(20):
        case = random_case(seed, slots=12, drafts=3)
        expected = case.choose()
        assert torch.equal(case.choose(device="cuda").cpu(), expected)
    case = random_case(3, vocab=2 * TILE + 77, slots=12, drafts=3)
    assert torch.equal(case.choose(device="cuda").cpu(), case.choose())


@pytest.mark.parametrize("kind", FILTER_KINDS)
def test_filters(kind: str) -> None:
    for spread in (0.5, 3.0, 12.0):
        case = filter_case(1, kind, num_rows=24, vocab=60_000, spread=spread)
        expected = case.choose(uses=FILTERED)
        assert torch.equal(case.choose(device="cuda", uses=FILTERED).cpu(), expected)
        case.logits.mul_(2).round_().div_(2)
        expected = case.choose(uses=FILTERED)
        assert torch.equal(case.choose(device="cuda", uses=FILTERED).cpu(), expected)


def test_nothing_is_chosen() -> None:
    case = filter_case(1, "top_p", num_rows=9, vocab=TILE + 300, spread=3.0)
    case.logits[0, 7] = torch.nan
    case.logits[1, TILE + 7] = torch.inf
    case.logits[2] = -torch.inf
    case.logits[3, :TILE] = -torch.inf
    case.slots[4] = -1
    case.table.allowed_bits[case.slots[5]] = 0
    for temperature in (0.0, 0.8):
        case.table.temperature.fill_(temperature)
        assert torch.equal(case.choose(device="cuda").cpu(), case.choose())


def random_rows(
    num_rows: int, vocab: int, seed: int
) -> tuple[torch.Tensor, SamplingTable, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Rows on the device, one slot each, of which about half have some filter."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def uniform() -> torch.Tensor:
        return torch.rand(num_rows, device="cuda", generator=generator)

    def chance(value: torch.Tensor, off: float, share: float) -> torch.Tensor:
        return torch.where(uniform() < share, value, off)

    table = SamplingTable.create(num_rows, vocab, device="cuda")
    table.temperature.copy_(chance(uniform() * 1.5 + 0.1, 0.0, 0.9))
    table.top_k.copy_(chance((uniform() * 100).ceil(), 0, 0.2))
    table.top_p.copy_(chance(uniform() * 0.9 + 0.1, 1.0, 0.4))
    table.min_p.copy_(chance(uniform() * 0.3, 0.0, 0.2))
    table.seed.random_(generator=generator)
    logits = torch.randn(num_rows, vocab, device="cuda", generator=generator)
    logits *= 8 * uniform().unsqueeze(-1) + 0.1
    logits[::3] = logits[::3].mul_(4).round_().div_(4)  # many ties
    places = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    nothing = torch.zeros(num_rows, 1, dtype=torch.int32, device="cuda")
    others = (places * 0, places, nothing[:, :0].long(), nothing, nothing)
    return logits, table, places, others


def test_a_million_rows() -> None:
    """Bit for bit the reference's choices, which run on the device here."""
    num_different = 0
    for seed in range(250):
        vocab, num_rows = ((1000, 4096), (TILE * 5 // 2, 400))[seed % 8 == 7]
        logits, table, slots, others = random_rows(num_rows, vocab, seed)
        found = [
            choose(logits, slots, others[0], table, *others[1:], uses=FILTERED, backend=backend)
            for backend in ("reference", "triton")
        ]
        num_different += int((found[0] != found[1]).sum())
    assert num_different == 0


@pytest.mark.parametrize("spread", [1.0, 6.0], ids=["flat", "peaked"])
def test_a_large_vocabulary(spread: float) -> None:
    """Rows that many programs share, under filters that keep nearly all, and hardly anything."""
    logits, table, slots, others = random_rows(48, 248_320, 3)
    logits.normal_(generator=torch.Generator("cuda").manual_seed(1)).mul_(spread)
    table.temperature.fill_(0.8)
    columns = {"top_k": (0, 20, 600), "top_p": (1.0, 0.95, 0.3, 0.02), "min_p": (0.0, 0.05)}
    for column, values in columns.items():
        for other in columns:
            getattr(table, other).fill_(columns[other][0])
        for value in values:
            getattr(table, column).fill_(value)
            found = [
                choose(
                    logits, slots, others[0], table, *others[1:], uses=FILTERED, backend=backend
                )
                for backend in ("reference", "triton")
            ]  # fmt: skip
            assert torch.equal(*found), f"{column} {value}"


def test_launches_do_not_matter() -> None:
    logits, table, slots, others = random_rows(64, 248_320, 5)
    found = []
    for tiles, splits, warps in ((1, 61, 4), (7, 3, 8), (61, 1, 4)):
        config = launch.LaunchConfig(tiles_per_program=tiles, num_splits=splits, num_warps=warps)
        out = torch.empty(64, dtype=torch.int64, device="cuda")
        rows = Rows(slots, others[0], None)
        launch.choose(logits, rows, table, Text(*others[1:]), FILTERED, out, config)
        found.append(out)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    few = choose(logits[40:44], slots[40:44], others[0][:4], table, *others[1:], uses=FILTERED)
    assert torch.equal(few, found[0][40:44])


def test_captured() -> None:
    """A graph reads no value and follows the table and the logits."""
    logits, table, slots, others = random_rows(16, 30_000, 1)
    out = torch.empty(16, dtype=torch.int64, device="cuda")

    def run() -> None:
        choose(logits, slots, others[0], table, *others[1:], out=out)

    before = logits.clone()
    with no_sync():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for temperature in (0.0, 0.7, 1.3):
        table.temperature.fill_(temperature)
        logits.copy_(before.roll(int(temperature * 10), -1))
        graph.replay()
        replayed = out.clone()
        run()
        assert torch.equal(replayed, out)
