"""Thousands of steps in low precision: folding rounds a state less often than decoding does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers.gdn_oracle import Tokens
from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops
from hybridspec.ops.ring import RingView

NUM_STEPS, EARLY, HEADS, DIM, SIZE = 4000, 500, 8, 8, 4


class TokenByToken:
    """Decodes one row after another and rounds the state to its dtype after each."""

    def __init__(self, rows: Tokens, compute: torch.dtype, state: torch.dtype) -> None:
        q, k, self.v, a, b = (part.to(compute) for part in rows.packed())
        self.decay = (-rows.A_log.to(compute).exp() * F.softplus(a)).exp()[:, :, None, None]
        self.k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        self.beta = b.sigmoid()[:, :, None]
        self.state = torch.zeros(HEADS, DIM, DIM, dtype=state)

    def advance(self, first: int, last: int) -> None:
        """Run rows first..last-1."""
        for t in range(first, last):
            wide, key = self.state * self.decay[t], self.k[t][:, None]
            u = self.beta[t] * (self.v[t] - (wide * key).sum(-1))
            self.state = (wide + u[:, :, None] * key).to(self.state.dtype)


def random_rows(generator: torch.Generator, count: int) -> Tokens:
    """Return rows in fp32; memory lasts from 10 to 10,000 tokens, by head."""
    shapes = ((count, HEADS, DIM),) * 3 + ((count, HEADS),) * 2
    rows = (torch.randn(shape, generator=generator) for shape in shapes)
    return Tokens(*rows, torch.linspace(-9.0, -2.0, HEADS), torch.zeros(HEADS))


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float32, 1.25)],
    ids=["bf16", "fp16", "fp32"],
)
def test_error_stays_below_that_of_rounding_after_every_token(
    dtype: torch.dtype, factor: float
) -> None:
    """In fp32 the rounding of the arithmetic is as large as that of the state, hence 1.25."""
    generator = torch.Generator().manual_seed(0)
    accepted = torch.randint(0, SIZE + 1, (NUM_STEPS,), generator=generator)
    rows = random_rows(generator, int(accepted.sum()) + SIZE)
    exact = TokenByToken(rows, torch.float64, torch.float64)
    rounded = TokenByToken(rows, torch.float32, dtype)
    state = torch.zeros(2, HEADS, DIM, DIM, dtype=dtype)
    ring = RingView(
        k=torch.full((2, HEADS, 32, DIM), torch.nan, dtype=dtype),
        u=torch.full((2, HEADS, 32, DIM), torch.nan, dtype=dtype),
        cum_log_decay=torch.full((2, HEADS, 32), torch.nan),
        ring_start=torch.zeros(2, dtype=torch.int32),
        history_len=torch.zeros(2, dtype=torch.int32),
    )
    slot, other, bounds = (torch.tensor(x, dtype=torch.int32) for x in ([0], [1], [0, SIZE]))
    seq_len, is_fold = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int8)
    errors = {"ours": [], "rounded": []}
    position = num_folds = 0
    for step, count in enumerate(accepted.tolist()):
        # rows that are not committed are simply fed again
        fed = rows.rows(position, position + SIZE)
        verified = torch.full((1,), SIZE, dtype=torch.int32)
        ring_ops.decide_folds(ring.history_len, slot, verified, is_fold, max_window=16)
        num_folds += int(is_fold)
        gated_delta_rule.verify(
            *fed.packed(), fed.A_log, fed.dt_bias, state, ring, bounds, slot,
            max_verify_tokens=SIZE, is_fold=is_fold,
        )  # fmt: skip
        ring_ops.commit(
            seq_len, ring.ring_start, ring.history_len, slot, is_fold, verified, slot + count,
            ring_capacity=32,
        )  # fmt: skip
        exact.advance(position, position + count)
        rounded.advance(position, position + count)
        position += count
        if step % 50 == 49:
            gated_delta_rule.materialize(state, ring, slot, other, slot + 32)
            for name, actual in (("ours", state[1]), ("rounded", rounded.state)):
                difference = (actual.double() - exact.state).norm()
                errors[name].append((difference / exact.state.norm()).item())
    assert num_folds > NUM_STEPS / 8
    ours, theirs = errors["ours"], errors["rounded"]
    assert sum(ours) <= factor * sum(theirs)
    early = EARLY // 50
    assert sum(ours[-5:]) <= 2.0 * sum(ours[early - 5 : early])
