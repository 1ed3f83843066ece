"""The rows of a window give the same bits however they are cut into steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.partitions import MOST_ROWS, WALKS, WINDOW, Walk, packed, walk
from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops
from hybridspec.ops.ring import RingView

pytestmark = pytest.mark.gpu

LENGTHS, SLOTS = (60, 51, 70, 25), (3, 0, 4, 2)
H, HV, K, V, CAPACITY = 2, 4, 128, 128, 32


def tokens(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return q, k, v, a and b of all tokens, and of eight wrong ones behind the last request."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((H, K), (H, K), (HV, V), (HV,), (HV,))
    rows = [torch.randn(len(LENGTHS) + 1, max(LENGTHS), *s, generator=generator) for s in shapes]
    return [x.to(device, dtype) for x in rows]


def run_walk(
    how: Walk, rows: list[Tensor], state_dtype: torch.dtype, backend: str = "ordered"
) -> tuple[Tensor, ...]:
    """Return outputs [B, L, HV, V], states and live ring rows at the end of a walk."""
    device, dtype = rows[0].device, rows[0].dtype
    generator = torch.Generator().manual_seed(5)
    state = torch.randn(5, HV, V, K, generator=generator).to(device, state_dtype)
    cursors = [torch.zeros(5, dtype=torch.int32, device=device) for _ in range(3)]
    ring = RingView(
        k=torch.full((5, H, CAPACITY, K), torch.nan, dtype=dtype, device=device),
        u=torch.full((5, HV, CAPACITY, V), torch.nan, dtype=dtype, device=device),
        cum_log_decay=torch.full((5, HV, CAPACITY), torch.nan, device=device),
        ring_start=cursors[1], history_len=cursors[2], max_window=WINDOW,
    )  # fmt: skip
    gates = [torch.linspace(-3, 1, HV, device=device), torch.linspace(-2, 1, HV, device=device)]
    out = torch.full((len(LENGTHS), max(LENGTHS), HV, V), torch.nan, dtype=dtype, device=device)

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    for parts in walk(how, LENGTHS):
        step = [packed(parts, x[:-1], x[-1]) for x in rows]
        sizes = column([part.size for part in parts])
        bounds = torch.cat((column([0]), sizes.cumsum(0, dtype=torch.int32)))
        slots = column([SLOTS[part.request] for part in parts])
        marks = slots.to(torch.int8)
        ring_ops.decide_folds(ring.history_len, slots, sizes, marks, max_window=WINDOW)
        y = gated_delta_rule.verify(
            *step, *gates, state, ring, bounds, slots,
            max_verify_tokens=MOST_ROWS, is_fold=marks, backend=backend,
        )  # fmt: skip
        for part, first in zip(parts, bounds.tolist(), strict=False):
            place = slice(part.first, part.first + part.kept)
            out[part.request, place] = y[first : first + part.kept]
        kept = column([part.kept for part in parts])
        ring_ops.commit(*cursors, slots, marks, sizes, kept, ring_capacity=CAPACITY)
    live = [
        pool[slot, :, (int(cursors[1][slot]) + torch.arange(int(cursors[2][slot]))) % CAPACITY]
        for slot in SLOTS
        for pool in ring[:3]
    ]
    return out, state, *live


def differing(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> int:
    """Count tensors that differ, NaN where nobody wrote being equal."""
    return sum(
        not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_walk_gives_the_same_bits(state_dtype: torch.dtype) -> None:
    rows = tokens()
    expected = run_walk(WALKS["one by one"], rows, state_dtype)
    walks = {name: run_walk(how, rows, state_dtype) for name, how in WALKS.items()}
    found = {name: differing(walked, expected) for name, walked in walks.items()}
    assert found == dict.fromkeys(WALKS, 0)


def test_the_fast_kernel_does_not() -> None:
    """So the comparison can fail."""
    rows = tokens()
    expected = run_walk(WALKS["one by one"], rows, torch.bfloat16, "triton")
    assert differing(run_walk(WALKS["eight at a time"], rows, torch.bfloat16, "triton"), expected)
