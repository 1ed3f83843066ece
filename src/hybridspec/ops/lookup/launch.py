"""Launch of the kernel that looks up: one program per request."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from hybridspec.ops.lookup.triton_look_up import look_up_kernel

__all__ = ["look_up"]

_BLOCK = 1024
_WARPS = 8


def look_up(
    token_pages: Tensor,
    page_table: Tensor,
    seq_len: Tensor,
    slots: Tensor,
    num_tokens: int,
    max_places: int,
    max_agreement: int,
    drafts: Tensor,
    num: Tensor,
    agreement: Tensor,
) -> None:
    """Fill drafts, num and agreement; see look_up.py."""
    size, count = drafts.shape
    if not (size and count):
        num.zero_()
        agreement.zero_()
        return
    with torch.cuda.device_of(slots):
        look_up_kernel[(size,)](
            token_pages, page_table, seq_len, slots, drafts, num, agreement, count,
            token_pages.shape[1], token_pages.stride(0), page_table.stride(0),
            NUM_TOKENS=num_tokens, MAX_PLACES=max_places, MAX_AGREEMENT=max_agreement,
            BLOCK=_BLOCK, BLOCK_DRAFTS=triton.next_power_of_2(count), num_warps=_WARPS,
        )  # fmt: skip
