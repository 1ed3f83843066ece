"""Stores the new keys and values of a step and describes its rows, for libraries that only attend.

Every length is computed where it lives, so that a captured step follows its cursors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec.ops._requests import Batch
from hybridspec.ops._triton_support import round_up_to_power_of_two
from hybridspec.ops.paged_attention.call import Pages, Rows

__all__ = ["AppendedRows", "append_rows", "append_rows_reference"]


class AppendedRows(NamedTuple):
    """A step's rows after they were stored.

    Attributes:
        kv_len: [B] int32, positions that a request's last row sees; 0 for padding and where a
            request has no rows.
        first_page: [B] int32, the first page of a request's slot; 0 where `kv_len` is 0.
        is_dead: [N] bool, rows of padding and rows past the last request.
    """

    kv_len: Tensor
    first_page: Tensor
    is_dead: Tensor


def append_rows(rows: Rows, pages: Pages, batch: Batch) -> AppendedRows:
    """Store rows [N, Hkv, D] in their requests' pages."""
    append = launch_append if rows.k.is_cuda else append_rows_reference
    return append(rows, pages, batch)


def append_rows_reference(rows: Rows, pages: Pages, batch: Batch) -> AppendedRows:
    """The same in plain PyTorch, on any device."""
    num_rows, page_size = rows.k.shape[0], pages.k.shape[1]
    bounds, slot_of = batch.cu_seqlens.to(torch.int64), batch.slots.to(torch.int64)
    num_tokens = bounds.diff()
    is_live = (slot_of >= 0) & (num_tokens > 0)
    safe = slot_of.clamp(min=0)
    kv_len = torch.where(is_live, pages.seq_len[safe] + num_tokens, 0)
    first_page = torch.where(is_live, pages.table[safe, 0], 0)

    row = torch.arange(num_rows, device=rows.k.device)
    request = torch.searchsorted(bounds[1:].contiguous(), row, right=True)
    is_dead = ~torch.cat((is_live, is_live.new_zeros(1)))[request]
    mine, live = request[~is_dead], row[~is_dead]
    positions = (kv_len - bounds[1:])[mine] + live
    page = pages.table[slot_of[mine], positions // page_size].to(torch.int64)
    for new, pool in ((rows.k, pages.k), (rows.v, pages.v)):
        pool[page, positions % page_size] = new[live].to(pool.dtype)
    return AppendedRows(kv_len.to(torch.int32), first_page.to(torch.int32), is_dead)


def launch_append(rows: Rows, pages: Pages, batch: Batch) -> AppendedRows:
    """The same as one Triton launch."""
    from hybridspec.ops.paged_attention.triton_append import append_kernel

    k, v = rows.k, rows.v
    k_pages, v_pages, page_table, seq_len = pages
    cu_seqlens, slots, _ = batch
    (num_rows, num_heads, head_dim), num_requests = k.shape, slots.shape[0]
    appended = AppendedRows(
        kv_len=torch.empty(num_requests, dtype=torch.int32, device=k.device),
        first_page=torch.empty(num_requests, dtype=torch.int32, device=k.device),
        is_dead=torch.empty(num_rows, dtype=torch.bool, device=k.device),
    )
    if num_rows == 0 or num_requests == 0:
        for column, value in zip(appended, (0, 0, True), strict=True):
            column.fill_(value)
        return appended
    with torch.cuda.device_of(k):
        append_kernel[(num_rows, num_heads)](
            k, v, k_pages, v_pages, *appended, page_table, seq_len, cu_seqlens, slots,
            num_requests, k_pages.shape[1], *k.stride()[:2], *v.stride()[:2],
            *k_pages.stride()[:3], *v_pages.stride()[:3], *page_table.stride(),
            D=head_dim,
            BLOCK_D=round_up_to_power_of_two(head_dim),
            REQUESTS=round_up_to_power_of_two(num_requests),
            num_warps=1,
        )  # fmt: skip
    return appended
