"""Launch of the Triton kernel, which is imported then, so that this module needs no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops.accept.table import Counts, Ends, RequestTable, StepResult, StepRows, TokenLog

__all__ = ["accept_rows"]


def accept_rows(
    chosen: Tensor,
    batch: StepRows,
    history_len: Tensor,
    requests: RequestTable,
    log: TokenLog,
    ends: Ends,
    counts: Counts,
    result: StepResult,
) -> None:
    """Accept in one launch, a program per request; see api.py."""
    from hybridspec.ops.accept.triton_accept import accept_kernel

    cu_seqlens, num_rows, slots, is_fold = batch
    end_bits, ends_from = ends
    table, count_row = counts
    with torch.cuda.device_of(chosen):
        accept_kernel[(slots.shape[0],)](
            chosen, cu_seqlens, num_rows, slots, is_fold,
            history_len, log.seq_len, requests.last_position, requests.is_done,
            requests.next_tokens, log.token_pages, log.page_table,
            end_bits, ends_from, table, count_row, result.packed, result.num_committed,
            end_bits.shape[1], log.page_table.stride(0), table.stride(0),
            NUM_DRAFTS=requests.most_drafts, PAGE=log.token_pages.shape[1],
            HAS_COUNTS=table.shape[0] > 0, num_warps=1,
        )  # fmt: skip
