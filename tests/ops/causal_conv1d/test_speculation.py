"""Rejected rows leave no trace: any sequence of steps equals one pass over the committed inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridspec.ops import causal_conv1d

WIDTH, CAPACITY, CHANNELS, SLOTS = 4, 16, 6, 3
CU = {rows: torch.tensor([0, rows], dtype=torch.int32) for rows in range(20)}


class Log:
    """One slot that is decoded by steps of which only a part is committed."""

    def __init__(self, dtype: torch.dtype = torch.float64, ring_dtype: torch.dtype | None = None):
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(80, CHANNELS, generator=generator, dtype=torch.float64).to(dtype)
        self.weight = torch.randn(CHANNELS, WIDTH, generator=generator, dtype=torch.float64)
        self.weight = self.weight.to(dtype)
        self.ring = torch.full((SLOTS, CAPACITY, CHANNELS), math.nan, dtype=ring_dtype or dtype)
        self.seq_len = torch.zeros(SLOTS, dtype=torch.int32)
        self.slots = torch.tensor([1], dtype=torch.int32)
        self.generator = generator

    @property
    def position(self) -> int:
        return int(self.seq_len[1])

    def prefill(self, num_rows: int) -> Tensor:
        x = self.inputs[self.position : self.position + num_rows]
        out = causal_conv1d.prefill(
            x, self.weight, self.ring, self.seq_len, CU[len(x)], self.slots, max_seqlen=20
        )
        self.seq_len[1] += num_rows
        return out

    def step(self, num_rows: int, num_committed: int) -> Tensor:
        """Verify rows of which those past `num_committed` are wrong drafts."""
        x = self.inputs[self.position : self.position + num_rows].clone()
        wrong = x[num_committed:]
        wrong.copy_(1e3 * torch.randn(wrong.shape, generator=self.generator))
        out = causal_conv1d.verify(
            x, self.weight, self.ring, self.seq_len, CU[num_rows], self.slots, max_verify_tokens=8
        )
        self.seq_len[1] += num_committed
        return out[:num_committed]

    def live_rows(self) -> Tensor:
        """The stored inputs of the last width - 1 positions, oldest first."""
        positions = range(max(self.position - WIDTH + 1, 0), self.position)
        return self.ring[1, [p % CAPACITY for p in positions]]


@pytest.mark.parametrize("num_committed", [0, 1, 2, 3, 4])
def test_reject_at_every_position(num_committed: int) -> None:
    for start in range(18):
        speculative, plain = Log(), Log()
        for log in (speculative, plain):
            log.prefill(start)
        outputs = [speculative.step(4, num_committed), speculative.step(2, 2)]
        right = [plain.step(1, 1) for _ in range(num_committed + 2)]
        torch.testing.assert_close(torch.cat(outputs), torch.cat(right), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(
            speculative.live_rows(), plain.live_rows(), rtol=0, atol=0, equal_nan=False
        )


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    chunks=st.lists(st.integers(0, 19), max_size=2),
    steps=st.lists(st.integers(0, 8).flatmap(lambda t: st.tuples(st.just(t), st.integers(0, t)))),
)
def test_any_sequence_of_steps(chunks: list[int], steps: list[tuple[int, int]]) -> None:
    """Chunked prefill and steps with rejects equal one pass over all committed inputs."""
    log, whole = Log(), Log()
    outputs = [log.prefill(chunk) for chunk in chunks]
    for num_rows, num_committed in steps:
        if log.position + num_rows > 80:
            break
        outputs.append(log.step(num_rows, num_committed))
    end = log.position
    right = causal_conv1d.prefill(
        whole.inputs[:end], whole.weight, whole.ring, whole.seq_len,
        torch.tensor([0, end]), whole.slots, max_seqlen=end,
    )  # fmt: skip
    whole.seq_len[1] = end
    outputs.append(right[:0])
    torch.testing.assert_close(torch.cat(outputs), right, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(log.live_rows(), whole.live_rows(), rtol=0, atol=0)
    assert log.ring[[0, 2]].isnan().all()


def test_rejected_rows_would_be_seen() -> None:
    """Teeth: without moving the cursor back, the wrong drafts enter."""
    log, plain = Log(), Log()
    log.step(4, 1)
    log.seq_len[1] = 4
    plain.prefill(4)
    wrong, right = log.step(1, 1), plain.step(1, 1)
    assert (wrong - right).abs().max() > 1


@pytest.mark.parametrize("ring_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_steps_agree_when_the_ring_rounds(ring_dtype: torch.dtype) -> None:
    """Fresh rows are rounded as stored ones are, so the split into steps does not matter."""
    results = []
    for plan in ([("prefill", 13)], [("step", 1)] * 13, [("step", 4), ("prefill", 5), ("step", 4)]):
        log = Log(torch.float32, ring_dtype)
        results.append(
            torch.cat([getattr(log, kind)(*([n] * (1 + (kind == "step")))) for kind, n in plan])
        )
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[2], results[0], rtol=1e-5, atol=1e-6)
