"""Attention over key/value pages in PyTorch operators: what a CPU runs.

Rows are appended first and then read back from the pages, so that fresh and stored keys have gone
through the same rounding: four rows in one step and in four steps see the same numbers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops._library import Lasting, Written
from hybridspec.ops._requests import Batch, Request, live_requests
from hybridspec.ops.norms import widened
from hybridspec.ops.paged_attention.call import Pages, Rows

__all__ = ["prefill", "verify"]

_MAX_MASK_ELEMENTS = 1 << 22


def verify(rows: Written[Rows], pages: Lasting[Written[Pages]], batch: Batch) -> None:
    """Append the rows, then attend; see `api.verify`."""
    q, out, scale = rows.q, rows.out, rows.score_scale()
    requests = live_requests(
        batch, pages.seq_len, num_rows=q.shape[0], max_name="max_verify_tokens"
    )
    _zero_padding_rows(out, requests)
    num_heads = rows.k.shape[1]
    for request in requests:
        keys, values = _append_and_read(rows, pages, request)
        result = _attend_few(_by_group(_rows_of(request, q), num_heads), keys, values, scale)
        _by_group(_rows_of(request, out), num_heads).copy_(result)


def prefill(rows: Written[Rows], pages: Written[Pages], batch: Batch) -> None:
    """Append the rows, then attend in blocks of queries; see `api.prefill`."""
    q, out, scale = rows.q, rows.out, rows.score_scale()
    requests = live_requests(batch, pages.seq_len, num_rows=q.shape[0], max_name="max_seqlen")
    _zero_padding_rows(out, requests)
    num_heads = rows.k.shape[1]
    for request in requests:
        keys, values = _append_and_read(rows, pages, request)
        start, stop, _, position = request
        length = position + stop - start
        # Without a prefix SDPA masks by itself; else a mask is needed, and blocks bound its size.
        block = max(_MAX_MASK_ELEMENTS // length, 1) if position else stop - start
        for first in range(start, stop, block):
            last = min(first + block, stop)
            end = position + last - start
            result = _attend_many(
                _by_group(q[first:last], num_heads), keys[:, :end], values[:, :end], scale
            )
            _by_group(out[first:last], num_heads).copy_(result)


def _attend_few(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of the last T positions: [Hkv, G, T, D] over [Hkv, L, D], one product a group."""
    num_heads, group, num_rows, head_dim = queries.shape
    mask = None
    if num_rows > 1:
        mask = keys.new_zeros(group, num_rows, keys.shape[1])
        mask[:, :, -num_rows:].fill_(-math.inf).triu_(1)
        mask = mask.view(group * num_rows, -1)
    result = F.scaled_dot_product_attention(
        widened(queries, keys.dtype).reshape(1, num_heads, group * num_rows, head_dim),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        scale=scale,
    )
    return result.view(num_heads, group, num_rows, head_dim)


def _attend_many(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The same for many rows: keys and values are broadcast, so that one mask serves a group."""
    num_heads, group, num_rows, head_dim = queries.shape
    length = keys.shape[1]
    mask = None
    if num_rows < length:
        mask = keys.new_full((num_rows, length), -math.inf).triu_(length - num_rows + 1)
    return F.scaled_dot_product_attention(
        queries.to(keys.dtype),
        keys.unsqueeze(1).expand(-1, group, -1, -1),
        values.unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )


def _append_and_read(rows: Rows, pages: Pages, request: Request) -> tuple[Tensor, Tensor]:
    """Store a request's rows and return all its keys and values, [Hkv, L, D] each."""
    start, stop, slot, position = request
    num_pages, page_size = pages.k.shape[:2]
    length = position + stop - start
    num_live = -(-length // page_size)
    if num_live > pages.table.shape[1]:
        raise ValueError(
            f"page_table: expected room for {length} positions in slot {slot}, got "
            f"{pages.table.shape[1]} pages of {page_size}"
        )
    table = pages.table[slot, :num_live]
    numbers = table.tolist()
    if min(numbers) < 0 or max(numbers) >= num_pages:
        raise ValueError(
            f"page_table: expected pages in [0, {num_pages}) for the {length} live positions of "
            f"slot {slot}, got {numbers}"
        )
    dtype = torch.float64 if rows.q.dtype == torch.float64 else torch.float32
    keys, values = (
        _append_and_view(_rows_of(request, new), pool, position, numbers, table)
        for new, pool in ((rows.k, pages.k), (rows.v, pages.v))
    )
    return widened(keys, dtype), widened(values, dtype)


def _append_and_view(
    rows: Tensor, pool: Tensor, position: int, pages: list[int], table: Tensor
) -> Tensor:
    """Store rows [T, Hkv, D] from `position` on and return all rows so far, [Hkv, L, D].

    That is a view if the pages follow each other in memory.
    """
    _, page_size, num_heads, head_dim = pool.shape
    num_rows = rows.shape[0]
    first_page, offset = divmod(position, page_size)
    if first_page == len(pages) - 1:
        pool[pages[-1], offset : offset + num_rows].copy_(rows)
    else:
        positions = torch.arange(position, position + num_rows, device=table.device)
        pool[table[positions // page_size], positions % page_size] = widened(rows, pool.dtype)

    length = position + num_rows
    page_stride, row_stride, head_stride = pool.stride()[:3]
    first = pages[0]
    if page_stride == page_size * row_stride and pages == [*range(first, first + len(pages))]:
        return pool.as_strided(
            (num_heads, length, head_dim),
            (head_stride, row_stride, 1),
            pool.storage_offset() + first * page_stride,
        )
    return pool.index_select(0, table).flatten(0, 1)[:length].transpose(0, 1)


def _rows_of(request: Request, packed: Tensor) -> Tensor:
    start, stop, _, _ = request
    return packed if stop - start == packed.shape[0] else packed[start:stop]


def _by_group(rows: Tensor, num_heads: int) -> Tensor:
    """View [T, Hq, D] as [Hkv, G, T, D]."""
    num_rows, _, head_dim = rows.shape
    return rows.view(num_rows, num_heads, -1, head_dim).permute(1, 2, 0, 3)


def _zero_padding_rows(out: Tensor, requests: list[Request]) -> None:
    if sum(request.stop - request.start for request in requests) != out.shape[0]:
        out.zero_()
