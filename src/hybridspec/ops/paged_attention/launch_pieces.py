"""How the kernels are launched that attend over pieces of a fixed number of positions.

They are compiled once for a layer: neither batch nor drafts nor lengths choose a constant of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._checks import row_alignment
from hybridspec.ops._requests import Batch
from hybridspec.ops._triton_support import capability, round_up_to_power_of_two
from hybridspec.ops.paged_attention import launch
from hybridspec.ops.paged_attention.append import append_rows
from hybridspec.ops.paged_attention.call import Pages, Rows

__all__ = ["explain_verify", "num_pieces", "verify"]

_BLOCK_M = 16
_PIECE = 512  # positions of each of the first 16 pieces


def num_pieces(max_positions: int) -> int:
    """Count the pieces of so many positions; `triton_pieces.piece_start` says where they begin."""
    count = doublings = 0
    while (count - 8 * doublings) * (_PIECE << doublings) < max_positions:
        count += 1
        doublings = max(count // 8 - 1, 0)
    return count


def explain_verify(rows: Rows, pages: Pages, batch: Batch) -> str | None:
    """Return why the kernels do not support a verify call, or None."""
    return launch.explain_verify(rows, pages, batch)


def verify(rows: Rows, pages: Pages, batch: Batch) -> None:
    """Append the rows, attend to every piece, and add the pieces; see `api.verify`."""
    from hybridspec.ops.paged_attention.triton_pieces import join_kernel, piece_kernel

    q, k, _, out, _ = rows
    k_pages, v_pages, page_table, seq_len = pages
    cu_seqlens, slots, max_rows = batch
    (num_rows, query_heads, head_dim), num_requests = q.shape, slots.shape[0]
    append_rows(rows, pages, batch)
    if num_rows == 0 or num_requests == 0 or max_rows == 0:
        out.zero_()
        return
    pieces = num_pieces(page_table.shape[1] * k_pages.shape[1])
    num_heads = k.shape[1]
    group = query_heads // num_heads
    q, scale_log2 = launch.positive_scale(q, rows.score_scale())
    config = launch.choose_launch(capability(q), 1, 1, _BLOCK_M, head_dim, q.element_size())
    parts = q.new_empty(pieces, num_rows, query_heads, head_dim, dtype=torch.float32)
    sums = q.new_empty(pieces, num_rows, query_heads, 2, dtype=torch.float32)
    lengths: tuple[Tensor, ...] = (seq_len, cu_seqlens, slots)
    with torch.cuda.device_of(q):
        piece_kernel[(num_requests * num_heads, -(-max_rows * group // _BLOCK_M), pieces)](
            q, k_pages, v_pages, parts, sums, page_table, *lengths, num_requests, num_rows,
            scale_log2, q.stride()[:2], k_pages.stride()[:3], *page_table.stride(),
            HEADS=num_heads,
            GROUP=group,
            D=head_dim,
            PAGE_SIZE=k_pages.shape[1],
            ALIGNMENT=row_alignment(k_pages, v_pages),
            BLOCK_M=_BLOCK_M,
            BLOCK_N=config.block_n,
            COLUMNS=min(head_dim & -head_dim, config.columns),
            STAGES=config.num_stages,
            PIECE=_PIECE,
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )  # fmt: skip
        join_kernel[(num_requests * query_heads, max_rows)](
            parts, sums, out, *lengths, num_requests, num_rows, out.stride()[:2],
            QUERY_HEADS=query_heads,
            D=head_dim,
            BLOCK_D=round_up_to_power_of_two(head_dim),
            PIECE=_PIECE,
            num_warps=1,
            enable_fp_fusion=True,
        )  # fmt: skip
