"""Dtypes, strides, buffers, and the text of every error."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers.attention_cases import (
    AttentionBatch,
    expected_output,
    expected_pages,
    make_attention_batch,
)
from hybridspec.errors import UnsupportedError
from hybridspec.ops import paged_attention

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAMES = ("q", "k", "v", "k_pages", "v_pages", "page_table", "seq_len", "cu_seqlens", "slots")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def verify(batch: AttentionBatch, **changes: object) -> Tensor:
    call = dict(zip(NAMES, batch.tensors, strict=True)) | {"max_verify_tokens": 4}
    return paged_attention.verify(**(call | changes))


def prefill(batch: AttentionBatch, **changes: object) -> Tensor:
    call = dict(zip(NAMES, batch.tensors, strict=True)) | {"max_seqlen": 4}
    return paged_attention.prefill(**(call | changes))


@pytest.fixture
def batch() -> AttentionBatch:
    return make_attention_batch([4, 1], [6, 0], [3, 1])


@pytest.mark.parametrize("op", [verify, prefill], ids=["verify", "prefill"])
@pytest.mark.parametrize("page_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_dtype_pairs(dtype: torch.dtype, page_dtype: torch.dtype, op: object) -> None:
    """Flash-attention's rule: twice the error of plain PyTorch in that dtype, plus rounding."""
    batch = make_attention_batch(
        [4, 3], [60, 17], [3, 1], head_dim=64, dtype=dtype, page_dtype=page_dtype
    )
    right, (k_pages, v_pages) = expected_output(batch), expected_pages(batch)
    plain = expected_output(batch, dtype=dtype)
    out = op(batch)
    assert out.dtype == dtype
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    allowed = 2 * (plain.double() - right).abs().max() + 8 * torch.finfo(accumulator).eps
    assert (out.double() - right).abs().max() <= allowed
    torch.testing.assert_close(batch.k_pages, k_pages, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(batch.v_pages, v_pages, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=name)
def test_index_dtypes(batch: AttentionBatch, index_dtype: torch.dtype) -> None:
    right = expected_output(batch)
    changes = {key: getattr(batch, key).to(index_dtype) for key in NAMES[5:]}
    for op in (verify, prefill):
        torch.testing.assert_close(op(batch, **changes), right, rtol=1e-12, atol=1e-12)


def test_scale(batch: AttentionBatch) -> None:
    for op in (verify, prefill):
        out = op(batch, scale=0.7)
        torch.testing.assert_close(out, expected_output(batch, scale=0.7), rtol=1e-12, atol=1e-12)


def test_large_scores_stay_finite(batch: AttentionBatch) -> None:
    for op in (verify, prefill):
        out = op(batch, scale=1e4)
        torch.testing.assert_close(out, expected_output(batch, scale=1e4), rtol=1e-9, atol=1e-9)


def test_cursor_is_the_callers(batch: AttentionBatch) -> None:
    """Any [S] tensor serves as the cursor, and no call moves it."""
    right = expected_output(batch)
    cursor = batch.seq_len.clone()
    batch.seq_len.fill_(-7)
    torch.testing.assert_close(verify(batch, seq_len=cursor), right, rtol=1e-12, atol=1e-12)
    assert cursor[[3, 1]].tolist() == [6, 0]
    assert batch.seq_len.eq(-7).all()


def test_results_do_not_share_memory(batch: AttentionBatch) -> None:
    first = verify(batch)
    kept = first.clone()
    batch.v.add_(1)
    second = verify(batch)
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


def test_output_buffer_is_used() -> None:
    for op in (verify, prefill):
        batch = make_attention_batch([4, 2, 1], [6, 3, 0], [3, -1, 1], tail_rows=1)
        fused = torch.full((8, 4, 20), math.nan, dtype=torch.float64)
        out = op(batch, out=fused[:, :, 2:18])
        assert out.data_ptr() == fused[:, :, 2:].data_ptr()
        torch.testing.assert_close(out, expected_output(batch), rtol=1e-12, atol=1e-12)
        assert fused[:, :, :2].isnan().all()
        assert fused[:, :, 18:].isnan().all()


ZERO = torch.zeros


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q": ZERO(5, 64)}, ValueError, r"q: expected shape \[N, Hq, D\].*got \[5, 64\]"),
        ({"k": ZERO(4, 2, 16)}, ValueError, r"k: .*\[5, Hkv, 16\], got \[4, 2, 16\]"),
        ({"v": ZERO(5, 2, 32)}, ValueError, r"v: .*\[5, 2, 16\], got \[5, 2, 32\]"),
        ({"k_pages": ZERO(7, 4, 3, 16)}, ValueError, r"k_pages: .*got \[7, 4, 3, 16\]"),
        ({"v_pages": ZERO(7, 9, 2, 16)}, ValueError, r"v_pages: .*got \[7, 9, 2, 16\]"),
        ({"page_table": ZERO(6).int()}, ValueError, r"page_table: .*got \[6\]"),
        ({"seq_len": ZERO(7).int()}, ValueError, r"seq_len: .*\[6\], got \[7\]"),
        ({"slots": ZERO(2, 1).int()}, ValueError, r"slots: .*got \[2, 1\]"),
        ({"cu_seqlens": ZERO(2).int()}, ValueError, r"cu_seqlens: .*\[3\], got \[2\]"),
        ({"q": ZERO(5, 3, 16)}, ValueError, r"q: .*multiple of the 2 heads of k, got 3"),
        ({"q": ZERO(5, 16, 4).transpose(1, 2)}, ValueError, r"q: expected a last stride of 1"),
        ({"q": ZERO(5, 4, 16).int()}, TypeError, r"q: expected dtype float32.*got int32"),
        ({"v": ZERO(5, 2, 16).int()}, TypeError, r"v: expected dtype float32.*got int32"),
        ({"page_table": ZERO(6, 5)}, TypeError, r"page_table: expected dtype int32, int64, got"),
        ({"seq_len": ZERO(6)}, TypeError, r"seq_len: expected dtype int32, int64, got"),
        ({"cu_seqlens": ZERO(3)}, TypeError, r"cu_seqlens: expected dtype"),
        ({"slots": ZERO(2)}, TypeError, r"slots: expected dtype"),
        ({"out": ZERO(5, 4, 8)}, ValueError, r"out: expected shape .*got \[5, 4, 8\]"),
        ({"out": ZERO(5, 4, 16).half()}, TypeError, r"out: expected dtype float64, got float16"),
        ({"backend": "abacus"}, ValueError, r"backend: expected one of 'auto', .*got 'abacus'"),
    ],
)
def test_wrong_calls(batch: AttentionBatch, changes: dict, error: type, text: str) -> None:
    for op in (verify, prefill):
        with pytest.raises(error, match=text):
            op(batch, **changes)


@pytest.mark.parametrize("head_dim", [8, 24, 272])
def test_head_size_that_no_backend_serves(head_dim: int) -> None:
    batch = make_attention_batch([1], [0], [0], head_dim=head_dim)
    with pytest.raises(UnsupportedError, match=f"q: .*multiple of 16 up to 256, got {head_dim}"):
        verify(batch)


def test_more_rows_than_announced(batch: AttentionBatch) -> None:
    with pytest.raises(ValueError, match="max_verify_tokens: .*got 3 but request 0 has 4"):
        verify(batch, max_verify_tokens=3)
    with pytest.raises(ValueError, match="max_seqlen: .*got 3 but request 0 has 4"):
        prefill(batch, max_seqlen=3)


def test_page_table_too_short(batch: AttentionBatch) -> None:
    text = "page_table: expected room for 10 positions in slot 3, got 2 pages of 4"
    for op in (verify, prefill):
        with pytest.raises(ValueError, match=text):
            op(batch, page_table=batch.page_table[:, :2])


@pytest.mark.parametrize("entry", [-1, 10**6])
def test_live_entry_that_is_no_page(batch: AttentionBatch, entry: int) -> None:
    batch.page_table[3, 1] = entry
    before = batch.k_pages.clone()
    for op in (verify, prefill):
        with pytest.raises(ValueError, match=r"page_table: expected pages in \[0, 7\) .*slot 3"):
            op(batch)
    torch.testing.assert_close(batch.k_pages, before, rtol=0, atol=0, equal_nan=True)
