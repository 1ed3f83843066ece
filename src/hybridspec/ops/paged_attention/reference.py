"""Plain PyTorch form of attention over key/value pages: the oracle of kernels, and the CPU path."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops._requests import live_requests

__all__ = ["prefill", "verify"]

_MASK_ELEMENTS = 1 << 22


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    max_verify_tokens: int,
    scale: float,
    out: Tensor,
) -> None:
    """Append the rows, then attend; see `api.verify`."""
    requests, num_rows = live_requests(
        cu_seqlens, slots, seq_len, max_rows=max_verify_tokens, max_name="max_verify_tokens"
    )
    if num_rows != out.shape[0]:
        out.zero_()
    num_heads = k.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for start, stop, slot, position in requests:
        length = position + stop - start
        pages = _live_pages(page_table[slot], length, k_pages)
        _append(k_pages, pages, position, k[start:stop])
        _append(v_pages, pages, position, v[start:stop])
        keys = _gather(k_pages, pages, length, dtype)
        values = _gather(v_pages, pages, length, dtype)
        queries = q[start:stop].to(dtype)
        queries = queries.view(stop - start, num_heads, -1, q.shape[2]).permute(1, 2, 0, 3)
        result = _attend_grouped(queries, keys, values, scale)
        out[start:stop].view(stop - start, num_heads, -1, q.shape[2]).copy_(
            result.permute(2, 0, 1, 3)
        )


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    max_seqlen: int,
    scale: float,
    out: Tensor,
) -> None:
    """Append the rows, then attend in blocks of queries; see `api.prefill`."""
    requests, num_rows = live_requests(
        cu_seqlens, slots, seq_len, max_rows=max_seqlen, max_name="max_seqlen"
    )
    if num_rows != out.shape[0]:
        out.zero_()
    num_heads = k.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for start, stop, slot, position in requests:
        length = position + stop - start
        pages = _live_pages(page_table[slot], length, k_pages)
        _append(k_pages, pages, position, k[start:stop])
        _append(v_pages, pages, position, v[start:stop])
        keys = _gather(k_pages, pages, length, dtype)
        values = _gather(v_pages, pages, length, dtype)
        block = max(1, _MASK_ELEMENTS // length)
        for first in range(start, stop, block):
            last = min(first + block, stop)
            end = position + last - start
            queries = q[first:last].to(dtype)
            queries = queries.view(last - first, num_heads, -1, q.shape[2]).permute(1, 2, 0, 3)
            result = _attend(queries, keys[:, :end], values[:, :end], scale)
            out[first:last].view(last - first, num_heads, -1, q.shape[2]).copy_(
                result.permute(2, 0, 1, 3)
            )


def _attend_grouped(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of few rows [Hkv, G, T, D]: the heads of a group share one product."""
    num_heads, group, num_rows, head_dim = queries.shape
    length = keys.shape[1]
    mask = None
    if num_rows > 1:
        mask = queries.new_full((group, num_rows, length), -math.inf)
        mask = mask.triu_(length - num_rows + 1).view(group * num_rows, length)
    result = F.scaled_dot_product_attention(
        queries.reshape(1, num_heads, group * num_rows, head_dim),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        scale=scale,
    )
    return result.view(num_heads, group, num_rows, head_dim)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of many rows [Hkv, G, T, D]; keys and values are broadcast over the group."""
    num_heads, group, num_rows, head_dim = queries.shape
    length = keys.shape[1]
    shape = (num_heads, group, length, head_dim)
    mask = None
    if num_rows < length:
        mask = queries.new_full((num_rows, length), -math.inf).triu_(length - num_rows + 1)
    return F.scaled_dot_product_attention(
        queries,
        keys.unsqueeze(1).expand(shape),
        values.unsqueeze(1).expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )


def _live_pages(table: Tensor, length: int, pages: Tensor) -> Tensor:
    """The page numbers [n] that hold the first `length` positions."""
    num_pages = -(-length // pages.shape[1])
    if num_pages > table.shape[0]:
        raise ValueError(
            f"page_table: expected at least {num_pages} pages per slot for {length} positions, "
            f"got {table.shape[0]}"
        )
    return table[:num_pages]


def _append(pool: Tensor, pages: Tensor, position: int, rows: Tensor) -> None:
    """Store rows at `position`, `position + 1`, ... of the request that owns `pages`."""
    page_size = pool.shape[1]
    positions = torch.arange(position, position + rows.shape[0], device=pool.device)
    pool[pages[positions // page_size], positions % page_size] = rows.to(pool.dtype)


def _gather(pool: Tensor, pages: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` rows of a request as [Hkv, length, D]."""
    rows = pool.index_select(0, pages).flatten(0, 1)[:length]
    return rows.to(dtype).transpose(0, 1)
