"""How many drafts of each request survive.

Row j of a request was fed draft token j (row 0: the last committed token) and its logits give the
token after it, so the draft in row j+1 is judged by what row j sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import Dims, check, check_dtype

__all__ = ["accept_drafts"]


def accept_drafts(sampled: Tensor, draft_tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Count the drafts that equal the token that plain decoding would have given.

        num_accepted[b] = largest n with draft_tokens[start_b + j + 1] == sampled[start_b + j]
                          for all j < n

    Args:
        sampled: token sampled after each row, [N], int64; in.
        draft_tokens: token fed to each row (row 0 of a request: its last committed token, which
            is not looked at), [N], int64; in.
        cu_seqlens: row offsets of the requests, [B+1], int32; rows past the last are ignored; in.

    Returns:
        Accepted drafts per request, [B], int32, at most T_b - 1, and 0 where T_b = 0.

    Raises:
        ValueError: if the shapes disagree.
        TypeError: if a dtype is wrong.
    """
    dims: Dims = {}
    check("sampled", sampled, "N", dims)
    check("draft_tokens", draft_tokens, "N", dims)
    check("cu_seqlens", cu_seqlens, "C", dims)
    check_dtype("cu_seqlens", cu_seqlens, torch.int32, torch.int64)
    if sampled.shape[0] == 0:
        return torch.zeros(cu_seqlens.shape[0] - 1, dtype=torch.int32, device=sampled.device)
    # Entries that straddle two requests are computed too and cut off by the clamp.
    num_rows = sampled.shape[0]
    num_rejected = torch.zeros(num_rows, dtype=torch.int64, device=sampled.device)
    torch.cumsum(draft_tokens[1:] != sampled[:-1], 0, out=num_rejected[1:])
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    rejected_before = num_rejected[starts.clamp(max=num_rows - 1)]
    first = torch.searchsorted(num_rejected, rejected_before, right=True)
    limit = (ends - starts - 1).clamp_(min=0)
    return torch.minimum(first - 1 - starts, limit).clamp_(min=0).to(torch.int32)
