"""Dtypes, strides, buffers, and the text of every error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.conv_cases import ConvBatch, expected_output, expected_ring, make_conv_batch
from hybridspec.ops import causal_conv1d

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def verify(batch: ConvBatch, **changes: object) -> Tensor:
    call = {
        "x": batch.x,
        "weight": batch.weight,
        "conv_ring": batch.conv_ring,
        "seq_len": batch.seq_len,
        "cu_seqlens": batch.cu_seqlens,
        "slots": batch.slots,
        "max_verify_tokens": 4,
    }
    return causal_conv1d.verify(**(call | changes))


def prefill(batch: ConvBatch, **changes: object) -> Tensor:
    return causal_conv1d.prefill(*batch.tensors, **({"max_seqlen": 4} | changes))


@pytest.fixture
def batch() -> ConvBatch:
    return make_conv_batch([4, 1], [6, 0], [3, 1])


@pytest.mark.parametrize("ring_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_dtype_pairs(dtype: torch.dtype, ring_dtype: torch.dtype) -> None:
    """Activation and ring in every pair of dtypes, against fp64."""
    batch = make_conv_batch(
        [4, 3], [6, 17], [3, 1], num_channels=64, dtype=dtype, ring_dtype=ring_dtype, has_bias=True
    )
    right, ring = expected_output(batch), expected_ring(batch)
    out = verify(batch, bias=batch.bias)
    assert out.dtype == dtype
    # The sum is kept in fp32 and rounded once: half a unit in the last place of the result, plus
    # four products' worth of fp32 rounding (nothing but fp64 rounding for fp64).
    accumulator = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    tolerance = 0.51 * torch.finfo(dtype).eps * right.abs() + 16 * accumulator
    assert ((out.double() - right).abs() <= tolerance).all()
    torch.testing.assert_close(batch.conv_ring, ring, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=name)
def test_index_dtypes(batch: ConvBatch, index_dtype: torch.dtype) -> None:
    right = expected_output(batch)
    changes = {
        key: getattr(batch, key).to(index_dtype) for key in ("seq_len", "cu_seqlens", "slots")
    }
    torch.testing.assert_close(verify(batch, **changes), right, rtol=1e-12, atol=1e-12)


def test_results_do_not_share_memory(batch: ConvBatch) -> None:
    first = verify(batch)
    kept = first.clone()
    batch.x.add_(1)
    second = verify(batch)
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


def test_output_buffer_is_used(batch: ConvBatch) -> None:
    for op in (verify, prefill):
        fused = torch.full((5, 9), 3.0, dtype=torch.float64)
        out = op(batch, out=fused[:, 2:7])
        torch.testing.assert_close(out, expected_output(batch), rtol=1e-12, atol=1e-12)
        assert fused[:, :2].eq(3).all()
        assert fused[:, 7:].eq(3).all()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": torch.zeros(5)}, ValueError, r"x: expected shape \[N, D\].*got \[5\]"),
        ({"x": torch.zeros(5, 4)}, ValueError, r"weight: .*\[4, width\], got \[5, 4\]"),
        ({"weight": torch.zeros(5, 1, 4)}, ValueError, r"weight: .*got \[5, 1, 4\]"),
        ({"conv_ring": torch.zeros(6, 5, 16)}, ValueError, r"conv_ring: .*got \[6, 5, 16\]"),
        ({"seq_len": torch.zeros(7).int()}, ValueError, r"seq_len: .*\[6\], got \[7\]"),
        ({"slots": torch.zeros(2, 1).int()}, ValueError, r"slots: .*got \[2, 1\]"),
        ({"cu_seqlens": torch.zeros(2).int()}, ValueError, r"cu_seqlens: .*\[3\], got \[2\]"),
        ({"x": torch.zeros(5, 5).t()}, ValueError, r"x: expected a last stride of 1"),
        (
            {"conv_ring": torch.zeros(6, 5, 16).transpose(1, 2)},
            ValueError,
            r"conv_ring: expected a last stride of 1",
        ),
        ({"x": torch.zeros(5, 5).int()}, TypeError, r"x: expected dtype float32.*got int32"),
        ({"weight": torch.zeros(5, 4).long()}, TypeError, r"weight: expected dtype.*got int64"),
        ({"conv_ring": torch.zeros(6, 16, 5).int()}, TypeError, r"conv_ring: expected dtype"),
        ({"seq_len": torch.zeros(6)}, TypeError, r"seq_len: expected dtype int32, int64, got"),
        ({"cu_seqlens": torch.zeros(3)}, TypeError, r"cu_seqlens: expected dtype"),
        ({"slots": torch.zeros(2)}, TypeError, r"slots: expected dtype"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias: expected shape \[D\] = \[5\], got \[4\]"),
        ({"bias": torch.zeros(5).int()}, TypeError, r"bias: expected dtype"),
        ({"activation": "gelu"}, ValueError, r"activation: expected 'silu' or None, got 'gelu'"),
        ({"out": torch.zeros(4, 5)}, ValueError, r"out: expected shape .*\[5, 5\], got \[4, 5\]"),
        ({"out": torch.zeros(5, 5).half()}, TypeError, r"out: expected dtype float64, got float16"),
        ({"backend": "abacus"}, ValueError, r"backend: expected one of 'auto', .*got 'abacus'"),
    ],
)
def test_wrong_calls(batch: ConvBatch, changes: dict, error: type, text: str) -> None:
    for op in (verify, prefill):
        if op is prefill and not changes.keys() <= {"bias", "activation", "out", "backend"}:
            continue
        with pytest.raises(error, match=text):
            op(batch, **changes)


@pytest.mark.parametrize("capacity", [1, 4, 6, 12])
def test_ring_capacity(capacity: int) -> None:
    batch = make_conv_batch([1], [0], [0], capacity=capacity)
    with pytest.raises(
        ValueError, match=f"conv_ring: .*power of two of at least 7.*got {capacity}"
    ):
        verify(batch)
    if capacity != 4:
        with pytest.raises(ValueError, match="conv_ring: .*power of two of at least 3"):
            prefill(batch)


def test_more_rows_than_announced(batch: ConvBatch) -> None:
    with pytest.raises(ValueError, match="max_verify_tokens: .*got 3 but request 0 has 4"):
        verify(batch, max_verify_tokens=3)
    with pytest.raises(ValueError, match="max_seqlen: .*got 3 but request 0 has 4"):
        prefill(batch, max_seqlen=3)
