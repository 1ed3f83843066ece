"""Attention over pieces gives a row the same bits, whatever step and batch it comes in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.partitions import MOST_ROWS, WALKS, Walk, packed, walk
from hybridspec.ops import paged_attention

pytestmark = pytest.mark.gpu

LENGTHS, SLOTS, BEFORE = (50, 30, 41), (2, 0, 3), (500, 3, 9000)
HEADS, QUERY_HEADS, D, PAGE = 2, 8, 256, 64


def run_walk(how: Walk, backend: str = "pieces", requests: tuple[int, ...] = (0, 1, 2)) -> Tensor:
    """Return outputs [B, L, Hq, D]; keys before the walk are random."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    pages_per_slot = 160
    k_pages, v_pages = random(480, PAGE, HEADS, D), random(480, PAGE, HEADS, D)
    table = torch.randperm(480, generator=generator).int().view(3, pages_per_slot)
    table = torch.cat((table[:1], table[:1] * 0 - 1, table[1:])).cuda()
    seq_len = column([3, 0, 500, 9000])
    rows = [random(4, max(LENGTHS), heads, D) for heads in (QUERY_HEADS, HEADS, HEADS)]
    out = torch.zeros(3, max(LENGTHS), QUERY_HEADS, D, dtype=torch.bfloat16, device="cuda")
    lengths = [length if b in requests else 0 for b, length in enumerate(LENGTHS)]
    for parts in walk(how, lengths):
        step = [packed(parts, x[:-1], x[-1]) for x in rows]
        sizes = column([part.size for part in parts])
        bounds = torch.cat((column([0]), sizes.cumsum(0, dtype=torch.int32)))
        slots = column([SLOTS[part.request] for part in parts])
        y = paged_attention.verify(
            *step, k_pages, v_pages, table, seq_len, bounds, slots,
            max_verify_tokens=MOST_ROWS, backend=backend,
        )  # fmt: skip
        for part, first in zip(parts, bounds.tolist(), strict=False):
            place = slice(part.first, part.first + part.kept)
            out[part.request, place] = y[first : first + part.kept]
            seq_len[SLOTS[part.request]] += part.kept
    return out


def test_every_walk_gives_the_same_bits() -> None:
    expected = run_walk(WALKS["one by one"])
    equal = {name: torch.equal(run_walk(how), expected) for name, how in WALKS.items()}
    assert equal == dict.fromkeys(WALKS, True)
    for request in range(3):
        alone = run_walk(WALKS["one by one"], requests=(request,))
        assert torch.equal(alone[request], expected[request])


def test_a_split_by_load_does_not() -> None:
    """So the comparison can fail."""
    expected = run_walk(WALKS["one by one"], "triton")
    assert not torch.equal(run_walk(WALKS["eight at a time"], "triton"), expected)
