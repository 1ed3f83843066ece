"""Ragged batches whose keys and values must be stored alike by kernel and oracle."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from helpers.attention_cases import AttentionBatch, expected_pages, make_attention_batch
from hybridspec.ops.paged_attention.append import append_rows_reference, launch_append

__all__ = ["CASES", "check_append", "moved"]

CASES = {
    "one row": ([1], [9], [2], {}),
    "no rows": ([0, 3, 0, 8, 0], [4, 14, 3, 30, 16], [0, 1, 4, 2, 3], {"page_size": 1}),
    "padding": ([2, 3, 1], [7, 0, 2], [-1, 3, -1], {"tail_rows": 3}),
    "slot caches": ([2, 4], [17, 3], [5, 0], {"page_size": 64, "head_dim": 48}),
    "heads": ([3], [6], [1], {"num_query_heads": 6, "num_kv_heads": 3}),
    "one head": ([2, 1], [5, 0], [1, -1], {"num_kv_heads": 1}),
    "nobody": ([], [], [], {"tail_rows": 2}),
    "no rows at all": ([0, 0], [4, 0], [1, -1], {}),
}


def check_append(name: str, dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    """Compare every bit of the pages, and what is said of requests and rows."""
    lengths, positions, slots, options = CASES[name]
    dtype, page_dtype = dtypes
    batch = make_attention_batch(
        lengths, positions, slots, dtype=dtype, page_dtype=page_dtype, **options
    )
    k_pages, v_pages = expected_pages(batch)
    plain, kernel = moved(batch, device), moved(batch, device)
    described = [
        append_rows_reference(*plain.call(0, None, plain.q)),
        launch_append(*kernel.call(0, None, kernel.q)),
    ]
    for mine in (plain, kernel):
        for pages, right in ((mine.k_pages, k_pages), (mine.v_pages, v_pages)):
            torch.testing.assert_close(pages.cpu(), right, rtol=0, atol=0, equal_nan=True)
            around = pages._base.cpu()
            around.as_strided(pages.shape, pages.stride(), pages.storage_offset()).fill_(torch.nan)
            assert around.isnan().all()
    for found, right in zip(*described, strict=True):
        assert found.dtype == right.dtype and torch.equal(found, right)
    live = [s >= 0 and n > 0 for s, n in zip(slots, lengths, strict=True)]
    ends = [p + n if is_live else 0 for p, n, is_live in zip(positions, lengths, live, strict=True)]
    assert described[0].kv_len.tolist() == ends
    rows = [s < 0 for s, n in zip(slots, lengths, strict=True) for _ in range(n)]
    assert described[0].is_dead.tolist() == rows + [True] * (len(batch.q) - len(rows))


def moved(batch: AttentionBatch, device: str) -> AttentionBatch:
    """The same batch in fresh memory of a device; each tensor has strides of its own.

    There is NaN around pages and 7 around rows, so that neither passes for the other.
    """

    def strided(tensor: Tensor, gap: int) -> Tensor:
        around = torch.nan if tensor.dim() == 4 else 7
        wide = tensor.new_full((*(size + gap for size in tensor.shape),), around)
        view = wide.to(device)[tuple(slice(gap // 2, gap // 2 + size) for size in tensor.shape)]
        view.copy_(tensor)
        return view

    names = ("q", "k", "v", "k_pages", "v_pages")
    integers = ("seq_len", "cu_seqlens", "slots")
    table = batch.page_table.repeat_interleave(2, 1).to(device)[:, ::2]
    return replace(
        batch,
        page_table=table,
        **{name: strided(getattr(batch, name), 8 * i + 8) for i, name in enumerate(names)},
        **{name: getattr(batch, name).to(device) for name in integers},
    )
