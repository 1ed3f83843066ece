"""Rejected rows leave no trace: any sequence of steps equals one pass over the committed rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridspec.ops import paged_attention

QUERY_HEADS, KV_HEADS, SIZE, PAGE_SIZE, SLOTS, LONGEST = 4, 2, 16, 4, 3, 60
CU = {rows: torch.tensor([0, rows], dtype=torch.int32) for rows in range(LONGEST + 1)}
CLOSE = {"rtol": 1e-13, "atol": 1e-13}


class Log:
    """One slot that is decoded by steps of which only a part is committed."""

    def __init__(self, dtype: torch.dtype = torch.float64, page_dtype: torch.dtype | None = None):
        generator = self.generator = torch.Generator().manual_seed(7)
        self.rows = torch.randn(
            LONGEST, QUERY_HEADS + 2 * KV_HEADS, SIZE, generator=generator, dtype=torch.float64
        ).to(dtype)
        num_pages = LONGEST // PAGE_SIZE
        shape = (num_pages + 2, PAGE_SIZE, KV_HEADS, SIZE)
        self.k_pages = torch.full(shape, math.nan, dtype=page_dtype or dtype)
        self.v_pages = self.k_pages.clone()
        self.page_table = torch.full((SLOTS, num_pages), -1, dtype=torch.int32)
        self.page_table[1] = torch.randperm(num_pages, generator=generator) + 1
        self.seq_len = torch.zeros(SLOTS, dtype=torch.int32)
        self.slots = torch.tensor([1], dtype=torch.int32)

    @property
    def position(self) -> int:
        return int(self.seq_len[1])

    def run(self, op: str, rows: Tensor) -> Tensor:
        limit = {"prefill": "max_seqlen", "verify": "max_verify_tokens"}[op]
        return getattr(paged_attention, op)(
            *rows.split((QUERY_HEADS, KV_HEADS, KV_HEADS), 1), self.k_pages, self.v_pages,
            self.page_table, self.seq_len, CU[len(rows)], self.slots, **{limit: LONGEST},
        )  # fmt: skip

    def prefill(self, num_rows: int) -> Tensor:
        out = self.run("prefill", self.rows[self.position : self.position + num_rows])
        self.seq_len[1] += num_rows
        return out

    def step(self, num_rows: int, num_committed: int) -> Tensor:
        """Verify rows of which those past `num_committed` are wrong drafts."""
        rows = self.rows[self.position : self.position + num_rows].clone()
        wrong = rows[num_committed:]
        wrong.copy_(1e3 * torch.randn(wrong.shape, generator=self.generator))
        out = self.run("verify", rows)
        self.seq_len[1] += num_committed
        return out[:num_committed]

    def live_rows(self) -> Tensor:
        """The stored keys and values of all positions before the cursor."""
        pages = self.page_table[1].long()
        stored = torch.stack((self.k_pages[pages], self.v_pages[pages]), 2).flatten(0, 1)
        return stored[: self.position]


@pytest.mark.parametrize("num_committed", [0, 1, 2, 3, 4])
def test_reject_at_every_position(num_committed: int) -> None:
    for start in range(9):
        speculative, plain = Log(), Log()
        for log in (speculative, plain):
            log.prefill(start)
        outputs = [speculative.step(4, num_committed), speculative.step(2, 2)]
        right = [plain.step(1, 1) for _ in range(num_committed + 2)]
        torch.testing.assert_close(torch.cat(outputs), torch.cat(right), **CLOSE)
        assert torch.equal(speculative.live_rows(), plain.live_rows())


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    chunks=st.lists(st.integers(0, 19), max_size=2),
    steps=st.lists(st.integers(0, 8).flatmap(lambda t: st.tuples(st.just(t), st.integers(0, t)))),
)
def test_any_sequence_of_steps(chunks: list[int], steps: list[tuple[int, int]]) -> None:
    """Chunked prefill and steps with rejects equal one pass over all committed rows."""
    log, whole = Log(), Log()
    outputs = [log.prefill(chunk) for chunk in chunks]
    for num_rows, num_committed in steps:
        if log.position + num_rows > LONGEST:
            break
        outputs.append(log.step(num_rows, num_committed))
    right = whole.prefill(log.position)
    outputs.append(right[:0])
    torch.testing.assert_close(torch.cat(outputs), right, **CLOSE)
    assert torch.equal(log.live_rows(), whole.live_rows())
    for pages in (log.k_pages, log.v_pages):
        assert pages[[0, -1]].isnan().all()


def test_rejected_rows_would_be_seen() -> None:
    """Teeth: without moving the cursor back, the wrong drafts enter."""
    log, plain = Log(), Log()
    log.step(4, 1)
    log.seq_len[1] = 4
    plain.prefill(4)
    wrong, right = log.step(1, 1), plain.step(1, 1)
    assert (wrong - right).abs().max() > 0.1


@pytest.mark.parametrize("page_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_steps_agree_when_the_pages_round(page_dtype: torch.dtype) -> None:
    """Fresh rows are rounded as stored ones are, so the split into steps does not matter."""
    whole, steps, mixed = (Log(torch.float32, page_dtype) for _ in range(3))
    right = whole.prefill(13)
    by_one = torch.cat([steps.step(1, 1) for _ in range(13)])
    by_four = torch.cat([mixed.step(4, 4), mixed.prefill(5), mixed.step(4, 4)])
    torch.testing.assert_close(by_one, right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(by_four, right, rtol=1e-5, atol=1e-6)


def test_two_slots_may_share_pages() -> None:
    """A page table is only read: two requests can hold the same full prefix page."""
    log = Log()
    log.prefill(PAGE_SIZE)
    log.page_table[2, :2] = torch.stack((log.page_table[1, 0], log.page_table[1, 5]))
    log.seq_len[2] = PAGE_SIZE
    rows = log.rows[PAGE_SIZE : PAGE_SIZE + 2].repeat(2, 1, 1)
    out = paged_attention.verify(
        *rows.split((QUERY_HEADS, KV_HEADS, KV_HEADS), 1), log.k_pages, log.v_pages,
        log.page_table, log.seq_len, torch.tensor([0, 2, 4]), torch.tensor([2, 1]),
        max_verify_tokens=2,
    )  # fmt: skip
    torch.testing.assert_close(out[:2], out[2:], **CLOSE)
