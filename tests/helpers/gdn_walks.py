"""Walks of the gated delta rule: tokens of requests cut into steps, and what is left in the end."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from helpers.partitions import MOST_ROWS, WINDOW, Walk, packed, walk
from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops
from hybridspec.ops.ring import RingView

__all__ = ["Tokens", "differing", "random_tokens", "run_walk", "whole_tokens"]

CAPACITY = 32


class Tokens(NamedTuple):
    """Tokens of requests and how a layer takes them.

    Attributes:
        lengths: tokens of each request.
        rows: q, k, v, a, b of all tokens, [B + 1, L, heads, ...]; the last are wrong drafts.
        A_log, dt_bias: [HV].
        state: checkpoints to begin with, [S, HV, V, K].
        use_qk_l2norm: whether q and k are normed.
    """

    lengths: tuple[int, ...]
    rows: list[Tensor]
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor
    use_qk_l2norm: bool = True


def random_tokens(
    state_dtype: torch.dtype,
    device: str = "cuda",
    lengths: tuple[int, ...] = (60, 51, 70, 25),
    heads: int = 2,
) -> Tokens:
    """Return random tokens in bf16: by default four requests, some of more than two windows."""
    value_heads, size, most = 2 * heads, 128, max(lengths)
    generator = torch.Generator().manual_seed(3)
    shapes = ((heads, size), (heads, size), (value_heads, size), (value_heads,), (value_heads,))
    rows = [torch.randn(len(lengths) + 1, most, *s, generator=generator) for s in shapes]
    state = torch.randn(5, value_heads, size, size, generator=generator)
    return Tokens(
        lengths,
        [x.to(device, torch.bfloat16) for x in rows],
        torch.linspace(-3, 1, value_heads, device=device),
        torch.linspace(-2, 1, value_heads, device=device),
        state.to(device, state_dtype),
    )


def whole_tokens() -> Tokens:
    """Return tokens in fp16 whose sums are exact in fp32, so that their order does not matter.

    Keys are quarters, strength is 1, there is no decay: u is a short sum of multiples of eighths.
    """
    generator = torch.Generator().manual_seed(7)
    shape = (3, 12, 1, 16)
    q, k, v = (torch.randint(0, 2, shape, generator=generator) * 2 - 1 for _ in range(3))
    v = v * torch.randint(1, 60, shape, generator=generator) / 64
    gate = torch.full(shape[:3], 100.0)
    rows = [q / 4, k / 4, v, -gate, gate]
    return Tokens(
        (12, 9), [x.half() for x in rows], torch.zeros(1), torch.zeros(1),
        torch.zeros(5, 1, 16, 16), use_qk_l2norm=False,
    )  # fmt: skip


def run_walk(
    how: Walk, tokens: Tokens, backend: str = "ordered", max_rows: int = MOST_ROWS
) -> tuple[Tensor, ...]:
    """Return outputs [B, L, HV, V], states and live ring rows at the end of a walk.

    Calls say that a request has at most `max_rows` rows.
    """
    q, k, v = tokens.rows[:3]
    lengths, device, state = tokens.lengths, v.device, tokens.state.clone()
    slots_of = (3, 0, 4, 2)[: len(lengths)]
    cursors = [torch.zeros(5, dtype=torch.int32, device=device) for _ in range(3)]
    ring = RingView(
        k=k.new_full((5, k.shape[2], CAPACITY, k.shape[3]), torch.nan),
        u=v.new_full((5, v.shape[2], CAPACITY, v.shape[3]), torch.nan),
        cum_log_decay=torch.full((5, v.shape[2], CAPACITY), torch.nan, device=device),
        ring_start=cursors[1], history_len=cursors[2], max_window=WINDOW,
    )  # fmt: skip
    out = torch.full_like(v[:-1], torch.nan)

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    for parts in walk(how, lengths):
        step = [packed(parts, x[:-1], x[-1]) for x in tokens.rows]
        sizes = column([part.size for part in parts])
        bounds = torch.cat((column([0]), sizes.cumsum(0, dtype=torch.int32)))
        slots = column([slots_of[part.request] for part in parts])
        marks = slots.to(torch.int8)
        ring_ops.decide_folds(ring.history_len, slots, sizes, marks, max_window=WINDOW)
        y = gated_delta_rule.verify(
            *step, tokens.A_log, tokens.dt_bias, state, ring, bounds, slots,
            max_verify_tokens=max_rows, is_fold=marks, use_qk_l2norm=tokens.use_qk_l2norm,
            backend=backend,
        )  # fmt: skip
        for part, first in zip(parts, bounds.tolist(), strict=False):
            place = slice(part.first, part.first + part.kept)
            out[part.request, place] = y[first : first + part.kept]
        kept = column([part.kept for part in parts])
        ring_ops.commit(*cursors, slots, marks, sizes, kept, ring_capacity=CAPACITY)
    starts, lives = (cursor.tolist() for cursor in cursors[1:])
    live = [
        pool[slot, :, (starts[slot] + torch.arange(lives[slot])) % CAPACITY]
        for slot in slots_of
        for pool in ring[:3]
    ]
    return out, state, *live


def differing(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> int:
    """Count tensors that differ, NaN where nobody wrote being equal."""
    return sum(
        not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        for a, b in zip(found, expected, strict=True)
    )
