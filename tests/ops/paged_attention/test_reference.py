"""The reference against a loop over rows and heads, on hand-made and on random batches."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.attention_cases import (
    AttentionBatch,
    expected_output,
    expected_pages,
    make_attention_batch,
)
from hybridspec.ops import paged_attention
from hybridspec.ops.paged_attention import cpu

EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def run_verify(batch: AttentionBatch) -> Tensor:
    return paged_attention.verify(*batch.tensors, max_verify_tokens=batch.longest)


def run_prefill(batch: AttentionBatch) -> Tensor:
    return paged_attention.prefill(*batch.tensors, max_seqlen=batch.longest)


def check_both(make: dict) -> None:
    """Output and pages of verify and prefill are what the loops say."""
    for run in (run_verify, run_prefill):
        batch = make_attention_batch(**make)
        right, (k_pages, v_pages) = expected_output(batch), expected_pages(batch)
        torch.testing.assert_close(run(batch), right, **CLOSE)
        torch.testing.assert_close(batch.k_pages, k_pages, **EXACT)
        torch.testing.assert_close(batch.v_pages, v_pages, **EXACT)


def test_literal_values() -> None:
    """One key: its value. Two keys whose scores differ by ln 3: weights 1/4 and 3/4."""
    pages = torch.full((2, 1, 1, 16), math.nan)
    call = {
        "q": torch.ones(2, 1, 16),
        "k": torch.zeros(2, 1, 16),
        "v": torch.tensor([4.0, 8.0]).repeat_interleave(16).view(2, 1, 16),
        "k_pages": pages,
        "v_pages": pages.clone(),
        "page_table": torch.tensor([[1, 0, -1]]),
        "seq_len": torch.tensor([0]),
        "cu_seqlens": torch.tensor([0, 2]),
        "slots": torch.tensor([0]),
    }
    call["k"][1] = math.log(3) / 16
    out = paged_attention.verify(**call, max_verify_tokens=2, scale=1.0)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([4.0, 7.0]))
    assert call["v_pages"][:, 0, 0, 0].tolist() == [8.0, 4.0]
    out = paged_attention.prefill(**call, max_seqlen=2, scale=2.0)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([4.0, 7.6]))


@pytest.mark.parametrize("fault", ["scale", "key", "value", "group", "causal"])
def test_oracle_has_teeth(fault: str) -> None:
    batch = make_attention_batch([3, 2], [9, 2], [4, 1])
    right = expected_output(batch)
    if fault == "key":
        batch.past_keys[0][0] += 1e-6
    elif fault == "value":
        batch.past_values[1][0] += 1e-6
    elif fault == "group":
        batch.q.copy_(batch.q[:, [0, 2, 1, 3]])
    elif fault == "causal":  # an earlier row that sees the last row's key
        batch.k[:4] = batch.k[1:].clone()
    wrong = expected_output(batch, scale=0.25 + 1e-6 if fault == "scale" else None)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(wrong, right, **CLOSE)


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 3), (6, 2), (12, 3), (8, 1), (16, 1)])
def test_head_groups(heads: tuple[int, int]) -> None:
    make = {"lengths": [3, 1], "positions": [6, 0], "slots": [2, 0]}
    check_both(make | {"num_query_heads": heads[0], "num_kv_heads": heads[1]})


@pytest.mark.parametrize("head_dim", [16, 48, 64, 96, 256])
def test_head_sizes(head_dim: int) -> None:
    check_both({"lengths": [3], "positions": [6], "slots": [2], "head_dim": head_dim})


@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "shuffled"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_page_sizes(page_size: int, is_ordered: bool) -> None:
    for position in (0, 1, 15, 16, 29):
        make = {"lengths": [4], "positions": [position], "slots": [3], "page_size": page_size}
        check_both(make | {"has_ordered_pages": is_ordered})


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8])
def test_row_counts(num_rows: int) -> None:
    check_both({"lengths": [num_rows, 1], "positions": [7, 3], "slots": [3, 2]})


@pytest.mark.parametrize("empty", [0, 1, 2], ids=["first", "middle", "last"])
def test_request_without_rows(empty: int) -> None:
    lengths = [3, 3, 3]
    lengths[empty] = 0
    check_both({"lengths": lengths, "positions": [5, 0, 30], "slots": [4, 2, 3]})


def test_key_lengths_zero_one_and_more() -> None:
    """No keys and no query, one query that is its own only key, and others in one batch."""
    check_both({"lengths": [0], "positions": [0], "slots": [0]})
    check_both({"lengths": [1], "positions": [0], "slots": [0]})
    make = {"lengths": [0, 1, 0, 4, 2], "positions": [0, 0, 1, 0, 1], "slots": [0, 4, 2, 1, 3]}
    check_both(make)


def test_rows_of_nobody() -> None:
    make = {"lengths": [2, 4, 3, 2], "positions": [7, 3, 0, 14], "slots": [-1, 5, -1, 0]}
    check_both(make | {"tail_rows": 3})
    check_both({"lengths": [1, 2], "positions": [3, 3], "slots": [-1, -1], "tail_rows": 1})
    check_both({"lengths": [], "positions": [], "slots": [], "tail_rows": 2})


def test_few_requests_long_context() -> None:
    """Two requests, four rows each, some thousand keys, against SDPA on repeated heads."""
    batch = make_attention_batch(
        [4, 4], [2044, 2300], [1, 0], page_size=16, num_query_heads=8, dtype=torch.float32
    )
    out = run_verify(batch)
    for index, (start, stop, _) in enumerate(batch.requests()):
        keys = torch.cat((batch.past_keys[index], batch.k[start:stop])).repeat_interleave(4, 1)
        values = torch.cat((batch.past_values[index], batch.v[start:stop])).repeat_interleave(4, 1)
        q, k, v = (x.double().transpose(0, 1) for x in (batch.q[start:stop], keys, values))
        mask = torch.ones(4, len(keys), dtype=torch.bool).tril(len(keys) - 4)
        right = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)
        torch.testing.assert_close(out[start:stop].double(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask_elements", [1, 64, 1 << 22])
@pytest.mark.parametrize("position", [0, 1, 23])
def test_prefill_blocks(position: int, mask_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of query rows that share a mask does not matter."""
    monkeypatch.setattr(cpu, "_MAX_MASK_ELEMENTS", mask_elements)
    batch = make_attention_batch([17, 3], [position, 2], [1, 4])
    torch.testing.assert_close(run_prefill(batch), expected_output(batch), **CLOSE)


@st.composite
def batches(draw: st.DrawFn) -> dict:
    num_requests = draw(st.integers(1, 4))
    per_request = {"min_size": num_requests, "max_size": num_requests}
    slots = draw(st.permutations(range(6)))[:num_requests]
    is_padding = draw(st.lists(st.sampled_from([False, False, False, True]), **per_request))
    num_kv_heads = draw(st.integers(1, 3))
    return {
        "lengths": draw(st.lists(st.integers(0, 5), **per_request)),
        "positions": draw(st.lists(st.integers(0, 20), **per_request)),
        "slots": [-1 if pad else slot for slot, pad in zip(slots, is_padding, strict=True)],
        "page_size": draw(st.sampled_from([1, 2, 3, 4, 16])),
        "num_query_heads": num_kv_heads * draw(st.integers(1, 4)),
        "num_kv_heads": num_kv_heads,
        "tail_rows": draw(st.integers(0, 2)),
        "has_ordered_pages": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**20)),
    }


def kinds(make: dict) -> set[str]:
    """What is special about a batch."""
    found = set()
    size = make["page_size"]
    live = [
        (length, position)
        for length, position, slot in zip(
            make["lengths"], make["positions"], make["slots"], strict=True
        )
        if slot >= 0
    ]
    for length, position in live:
        if length == 0:
            found.add("no rows")
            continue
        found.add("at the start" if position == 0 else "with a prefix")
        if length == 1:
            found.add("one row")
        if position // size != (position + length - 1) // size:
            found.add("rows on several pages")
        if position > 0 and position % size == 0:
            found.add("fresh page")
        if (position + length) % size == 0:
            found.add("full page")
        if position + length > size:
            found.add("ordered" if make["has_ordered_pages"] else "shuffled")
    if len({length for length, _ in live}) > 1:
        found.add("ragged")
    if len(live) < len(make["lengths"]):
        found.add("padding")
    if make["tail_rows"]:
        found.add("rows past the end")
    return found


ALL_KINDS = {
    "no rows", "at the start", "with a prefix", "one row", "rows on several pages", "fresh page",
    "full page", "ordered", "shuffled", "ragged", "padding", "rows past the end",
}  # fmt: skip


def test_random_batches() -> None:
    seen: dict[str, int] = {}

    @settings(derandomize=True, max_examples=80, deadline=None)
    @given(make=batches())
    def check(make: dict) -> None:
        for kind in kinds(make):
            seen[kind] = seen.get(kind, 0) + 1
        check_both(make)

    check()
    assert set(seen) == ALL_KINDS
    assert min(seen.values()) >= 5, seen


@settings(derandomize=True, max_examples=40, deadline=None)
@given(make=batches(), order=st.randoms(use_true_random=False))
def test_requests_may_come_in_any_order(make: dict, order: random.Random) -> None:
    """Cursors follow the slot: a permuted batch gives permuted rows and the same pages."""
    make = make | {"tail_rows": 0}
    batch, again = make_attention_batch(**make), make_attention_batch(**make)
    permutation = list(range(len(make["lengths"])))
    order.shuffle(permutation)
    bounds = batch.cu_seqlens.tolist()
    rows = [row for i in permutation for row in range(bounds[i], bounds[i + 1])]
    cu_seqlens = torch.tensor([0, *(make["lengths"][i] for i in permutation)]).cumsum(0).int()
    right = run_verify(batch)
    out = paged_attention.verify(
        again.q[rows], again.k[rows], again.v[rows], again.k_pages, again.v_pages,
        again.page_table, again.seq_len, cu_seqlens, again.slots[permutation],
        max_verify_tokens=again.longest,
    )  # fmt: skip
    torch.testing.assert_close(out, right[rows], **CLOSE)
    torch.testing.assert_close(again.k_pages, batch.k_pages, **EXACT)
    torch.testing.assert_close(again.v_pages, batch.v_pages, **EXACT)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(make=batches(), order=st.randoms(use_true_random=False))
def test_pages_may_lie_anywhere(make: dict, order: random.Random) -> None:
    """Moving pages in the pool, and the table with them, changes nothing."""
    batch, moved = make_attention_batch(**make), make_attention_batch(**make)
    place = list(range(batch.k_pages.shape[0]))
    order.shuffle(place)
    destination = torch.tensor(place)
    moved.k_pages[destination] = batch.k_pages
    moved.v_pages[destination] = batch.v_pages
    is_page = (moved.page_table >= 0) & (moved.page_table < len(place))
    moved.page_table[is_page] = destination[moved.page_table[is_page]].int()
    torch.testing.assert_close(run_verify(moved), run_verify(batch), **CLOSE)
    torch.testing.assert_close(moved.k_pages[destination], batch.k_pages, **EXACT)
    torch.testing.assert_close(moved.v_pages[destination], batch.v_pages, **EXACT)
