"""Stores the new keys and values of a step and describes its rows, for libraries that only attend.

Every length is computed where it lives, so that a captured step follows its cursors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec.ops._triton_support import round_up_to_power_of_two

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


def append_rows(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
) -> AppendedRows:
    """Store rows [N, Hkv, D] in their requests' pages; arguments as `api.verify`."""
    if not k.is_cuda:
        return append_rows_reference(k, v, k_pages, v_pages, page_table, seq_len, cu_seqlens, slots)
    return launch_append(k, v, k_pages, v_pages, page_table, seq_len, cu_seqlens, slots)


def append_rows_reference(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
) -> AppendedRows:
    """The same in plain PyTorch, on any device."""
    num_rows, page_size = k.shape[0], k_pages.shape[1]
    bounds, slot_of = cu_seqlens.to(torch.int64), slots.to(torch.int64)
    num_tokens = bounds.diff()
    is_live = (slot_of >= 0) & (num_tokens > 0)
    safe = slot_of.clamp(min=0)
    kv_len = torch.where(is_live, seq_len[safe] + num_tokens, 0)
    first_page = torch.where(is_live, page_table[safe, 0], 0)

    rows = torch.arange(num_rows, device=k.device)
    request = torch.searchsorted(bounds[1:].contiguous(), rows, right=True)
    is_dead = ~torch.cat((is_live, is_live.new_zeros(1)))[request]
    mine, live_rows = request[~is_dead], rows[~is_dead]
    positions = (kv_len - bounds[1:])[mine] + live_rows
    pages = page_table[slot_of[mine], positions // page_size].to(torch.int64)
    for new, pool in ((k, k_pages), (v, v_pages)):
        pool[pages, positions % page_size] = new[live_rows].to(pool.dtype)
    return AppendedRows(kv_len.to(torch.int32), first_page.to(torch.int32), is_dead)


def launch_append(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
) -> AppendedRows:
    """The same as one Triton launch."""
    from hybridspec.ops.paged_attention.triton_append import append_kernel

    (num_rows, num_heads, head_dim), num_requests = k.shape, slots.shape[0]
    rows = AppendedRows(
        kv_len=torch.empty(num_requests, dtype=torch.int32, device=k.device),
        first_page=torch.empty(num_requests, dtype=torch.int32, device=k.device),
        is_dead=torch.empty(num_rows, dtype=torch.bool, device=k.device),
    )
    if num_rows == 0 or num_requests == 0:
        return AppendedRows(rows.kv_len.zero_(), rows.first_page.zero_(), rows.is_dead.fill_(True))
    with torch.cuda.device_of(k):
        append_kernel[(num_rows, num_heads)](
            k, v, k_pages, v_pages, *rows, page_table, seq_len, cu_seqlens, slots, num_requests,
            k_pages.shape[1], *k.stride()[:2], *v.stride()[:2], *k_pages.stride()[:3],
            *v_pages.stride()[:3], *page_table.stride(),
            D=head_dim,
            BLOCK_D=round_up_to_power_of_two(head_dim),
            REQUESTS=round_up_to_power_of_two(num_requests),
            num_warps=1,
        )  # fmt: skip
    return rows
