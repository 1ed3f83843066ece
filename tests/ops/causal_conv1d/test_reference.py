"""The reference against a loop over rows and taps, on hand-made and on random batches."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.conv_cases import ConvBatch, expected_output, expected_ring, make_conv_batch
from hybridspec.ops import causal_conv1d

EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}


def run_verify(batch: ConvBatch, activation: str | None = "silu") -> Tensor:
    return causal_conv1d.verify(
        *batch.tensors, max_verify_tokens=batch.longest, bias=batch.bias, activation=activation
    )


def run_prefill(batch: ConvBatch, activation: str | None = "silu") -> Tensor:
    return causal_conv1d.prefill(
        *batch.tensors, max_seqlen=batch.longest, bias=batch.bias, activation=activation
    )


def check_both(make: dict, activation: str | None = "silu") -> None:
    """Output and ring of verify and prefill are what the loops say."""
    batch = make_conv_batch(**make)
    right, ring = expected_output(batch, activation), expected_ring(batch)
    torch.testing.assert_close(run_verify(batch, activation), right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(batch.conv_ring, ring, **EXACT)

    batch = make_conv_batch(**make)
    ring = expected_ring(batch, num_kept=batch.weight.shape[1] - 1)
    torch.testing.assert_close(run_prefill(batch, activation), right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(batch.conv_ring, ring, **EXACT)


def one_channel(inputs: list[float], weight: list[float], capacity: int = 4) -> dict:
    return {
        "x": torch.tensor(inputs)[:, None],
        "weight": torch.tensor([weight]),
        "conv_ring": torch.full((1, capacity, 1), math.nan),
        "seq_len": torch.tensor([0]),
        "cu_seqlens": torch.tensor([0, len(inputs)]),
        "slots": torch.tensor([0]),
    }


def test_literal_values() -> None:
    call = one_channel([1.0, 2.0, 3.0, 4.0], [1000.0, 100.0, 10.0, 1.0], capacity=8)
    right = [[1.0], [12.0], [123.0], [1234.0]]
    out = causal_conv1d.verify(**call, max_verify_tokens=4, activation=None)
    assert out.tolist() == right
    assert call["conv_ring"][0, :4, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert call["conv_ring"].isnan().sum() == 4
    call = one_channel([1.0, 2.0, 3.0, 4.0], [1000.0, 100.0, 10.0, 1.0])
    assert causal_conv1d.prefill(**call, max_seqlen=4, activation=None).tolist() == right
    assert call["conv_ring"][0, 1:, 0].tolist() == [2.0, 3.0, 4.0]
    assert call["conv_ring"].isnan().sum() == 1


def test_literal_activation_and_bias() -> None:
    call = one_channel([0.0], [1.0, 1.0])
    out = causal_conv1d.verify(**call, max_verify_tokens=1, bias=torch.tensor([2.0]))
    assert out.item() == pytest.approx(2 / (1 + math.exp(-2)), rel=1e-6)


@pytest.mark.parametrize("fault", ["taps", "history", "wrap", "silu", "bias"])
def test_oracle_has_teeth(fault: str) -> None:
    batch = make_conv_batch([3, 2], [15, 2], [4, 1], has_bias=True)
    right = expected_output(batch)
    if fault == "taps":
        batch.weight.copy_(batch.weight.flip(1))
    elif fault == "history":
        batch.history[1][-1] = 0
    elif fault == "wrap":
        batch.history[0][:] = batch.history[0].roll(1, 0)
    elif fault == "bias":
        batch.bias[0] += 1e-9
    wrong = expected_output(batch, None if fault == "silu" else "silu")
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(wrong, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_widths(width: int, has_bias: bool, activation: str | None) -> None:
    make = {"lengths": [3, 1, 2], "positions": [0, 1, 9], "slots": [2, 5, 0]}
    check_both(make | {"width": width, "has_bias": has_bias}, activation)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_ring_offset(num_rows: int) -> None:
    for position in [*range(17), 31, 1000]:
        check_both({"lengths": [num_rows], "positions": [position], "slots": [3]})


def test_smallest_ring() -> None:
    for position in range(9):
        check_both({"lengths": [1], "positions": [position], "slots": [0], "capacity": 4})


@pytest.mark.parametrize("empty", [0, 1, 2], ids=["first", "middle", "last"])
def test_request_without_rows(empty: int) -> None:
    lengths = [3, 3, 3]
    lengths[empty] = 0
    check_both({"lengths": lengths, "positions": [5, 0, 30], "slots": [4, 2, 3]})


def test_rows_of_nobody() -> None:
    make = {"lengths": [2, 4, 3, 2], "positions": [7, 3, 0, 14], "slots": [-1, 5, -1, 0]}
    check_both(make | {"tail_rows": 3})
    check_both({"lengths": [1, 2], "positions": [3, 3], "slots": [-1, -1], "tail_rows": 1})
    check_both({"lengths": [], "positions": [], "slots": [], "tail_rows": 2})
    check_both({"lengths": [0], "positions": [3], "slots": [1]})


def test_output_of_nobody_is_zero_where_nan_was() -> None:
    batch = make_conv_batch([2, 1, 0], [4, 4, 4], [-1, 2, 3], tail_rows=2)
    for op, limit in (
        (causal_conv1d.verify, {"max_verify_tokens": 2}),
        (causal_conv1d.prefill, {"max_seqlen": 2}),
    ):
        out = torch.full((5, 8), math.nan, dtype=torch.float64)[:, 2:7]
        assert op(*batch.tensors, out=out, **limit) is out
        assert out[[0, 1, 3, 4]].eq(0).all()
        assert out[2].isfinite().all()


def test_long_prefill_equals_torch() -> None:
    batch = make_conv_batch([300], [0], [1], num_channels=24, dtype=torch.float32)
    padded = F.pad(batch.x.t(), (3, 0))
    right = F.silu(F.conv1d(padded[None], batch.weight.contiguous()[:, None], groups=24))[0].t()
    torch.testing.assert_close(run_prefill(batch), right, rtol=1e-5, atol=1e-5)


@st.composite
def batches(draw: st.DrawFn) -> dict:
    width = draw(st.integers(1, 5))
    num_requests = draw(st.integers(1, 4))
    per_request = {"min_size": num_requests, "max_size": num_requests}
    slots = draw(st.permutations(range(6)))[:num_requests]
    is_padding = draw(st.lists(st.sampled_from([False, False, False, True]), **per_request))
    lengths = draw(st.lists(st.integers(0, 4), **per_request))
    needed = width - 1 + max(lengths)
    return {
        "lengths": lengths,
        "positions": draw(st.lists(st.integers(0, 40), **per_request)),
        "slots": [-1 if pad else slot for slot, pad in zip(slots, is_padding, strict=True)],
        "width": width,
        "capacity": draw(st.sampled_from([c for c in (1, 2, 4, 8, 16) if c >= needed])),
        "tail_rows": draw(st.integers(0, 2)),
        "has_bias": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**20)),
    }


def kinds(make: dict) -> set[str]:
    """What is special about a batch."""
    found = set()
    live = [
        (length, position, slot)
        for length, position, slot in zip(
            make["lengths"], make["positions"], make["slots"], strict=True
        )
        if slot >= 0
    ]
    for length, position, _ in live:
        capacity, reach = make["capacity"], make["width"] - 1
        if length == 0:
            found.add("no rows")
            continue
        if 0 < position < reach:
            found.add("partly before the start")
        if position == 0:
            found.add("at the start")
        if position % capacity + length > capacity:
            found.add("append wraps")
        if position >= reach > 0 and (position - reach) % capacity > position % capacity:
            found.add("history wraps")
        if reach + length == capacity:
            found.add("full ring")
    if len({length for length, _, _ in live}) > 1:
        found.add("ragged")
    if len(live) > 1 and len({length for length, _, _ in live}) == 1:
        found.add("uniform")
    if len(live) < len(make["lengths"]):
        found.add("padding")
    if make["tail_rows"]:
        found.add("rows past the end")
    return found


ALL_KINDS = {
    "no rows", "at the start", "partly before the start", "append wraps", "history wraps",
    "full ring", "ragged", "uniform", "padding", "rows past the end",
}  # fmt: skip


def test_random_batches() -> None:
    seen: dict[str, int] = {}

    @settings(derandomize=True, max_examples=150, deadline=None)
    @given(make=batches(), activation=st.sampled_from(["silu", None]))
    def check(make: dict, activation: str | None) -> None:
        for kind in kinds(make):
            seen[kind] = seen.get(kind, 0) + 1
        check_both(make, activation)

    check()
    assert set(seen) == ALL_KINDS
    assert min(seen.values()) >= 5, seen


@settings(derandomize=True, max_examples=40, deadline=None)
@given(make=batches(), order=st.randoms(use_true_random=False))
def test_requests_may_come_in_any_order(make: dict, order: random.Random) -> None:
    """Cursors follow the slot: a permuted batch gives permuted rows and the same rings."""
    make = make | {"tail_rows": 0}
    batch, again = make_conv_batch(**make), make_conv_batch(**make)
    permutation = list(range(len(make["lengths"])))
    order.shuffle(permutation)
    bounds = batch.cu_seqlens.tolist()
    rows = [row for i in permutation for row in range(bounds[i], bounds[i + 1])]
    cu_seqlens = torch.tensor([0, *(make["lengths"][i] for i in permutation)]).cumsum(0).int()
    right = run_verify(batch)
    out = causal_conv1d.verify(
        again.x[rows], again.weight, again.conv_ring, again.seq_len, cu_seqlens,
        again.slots[permutation], max_verify_tokens=again.longest, bias=again.bias,
    )  # fmt: skip
    torch.testing.assert_close(out, right[rows], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(again.conv_ring, batch.conv_ring, **EXACT)
