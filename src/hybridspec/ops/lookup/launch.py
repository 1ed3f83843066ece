"""Launch of the kernel that looks up: one program per request.

The kernel is imported when it is launched, so this needs no Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._triton_support import round_up_to_power_of_two
from hybridspec.ops.lookup.call import Found, Log, Search

__all__ = ["look_up"]

_BLOCK = 1024
_WARPS = 8


def look_up(log: Log, slots: Tensor, search: Search, found: Found) -> None:
    """Fill drafts, num and agreement; see look_up.py."""
    from hybridspec.ops.lookup.triton_look_up import look_up_kernel

    token_pages, page_table, seq_len = log
    drafts, num, agreement = found
    size, count = drafts.shape
    if not (size and count):
        num.zero_()
        agreement.zero_()
        return
    with torch.cuda.device_of(slots):
        look_up_kernel[(size,)](
            token_pages, page_table, seq_len, slots, drafts, num, agreement, count,
            token_pages.shape[1], token_pages.stride(0), page_table.stride(0),
            NUM_TOKENS=search.num_tokens, MAX_PLACES=search.max_places,
            MAX_AGREEMENT=search.max_agreement,
            BLOCK=_BLOCK, BLOCK_DRAFTS=round_up_to_power_of_two(count), num_warps=_WARPS,
        )  # fmt: skip
