"""How many drafts of each request survive: drafter-invariant, and the textbook p/q rule.

Row j of a request was fed draft token j (row 0: the last committed token) and its logits give the
token after it, so the draft in row j+1 is judged by what row j sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import Dims, check, check_dtype

__all__ = ["accept_drafts", "rejection_sample"]


def _leading_true(is_accepted: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Length of the run of accepted drafts of each request, [B] int32.

    is_accepted[i] says whether row i+1's draft agrees with row i; entries that straddle two
    requests are computed too and cut off by the clamp.
    """
    num_rows = is_accepted.shape[0] + 1
    num_rejected = torch.zeros(num_rows, dtype=torch.int64, device=is_accepted.device)
    torch.cumsum(~is_accepted, 0, out=num_rejected[1:])
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    rejected_before = num_rejected[starts.clamp(max=num_rows - 1)]
    first = torch.searchsorted(num_rejected, rejected_before, right=True)
    limit = (ends - starts - 1).clamp_(min=0)
    return torch.minimum(first - 1 - starts, limit).clamp_(min=0).to(torch.int32)


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
    return _leading_true(draft_tokens[1:] == sampled[:-1], cu_seqlens)


def rejection_sample(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    cu_seqlens: Tensor,
    uniforms: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept drafts with probability min(1, p/q) and resample the first rejected one.

        draft x in row j+1 is accepted iff uniforms[j] * q_j(x) < p_j(x)
        next token ~ normalised max(p_j - q_j, 0) at the first rejection, or p_j after the last row

    The committed tokens are distributed as p only if the rows were chosen without looking at the
    drafted tokens. Verifying a row because its draft looked likely biases the result (README.md).

    Args:
        target_probs: p, the target's distribution after each row, [N, V], floating; in.
        draft_probs: q, the distribution that the draft in the *next* row was drawn from, [N, V];
            a request's last row is not looked at; in.
        draft_tokens: token fed to each row, [N], int64; in.
        cu_seqlens: row offsets of the requests, [B+1], int32; in.
        uniforms: in [0, 1), [N]; in.
        noise: Gumbel noise for the token that is sampled, independent of `uniforms`, [N, V]; in.

    Returns:
        num_accepted [B] int32, and the next token [B] int64 (recovered or bonus; -1 where T_b = 0).

    Raises:
        ValueError: if the shapes disagree.
        TypeError: if a dtype is wrong.

    Source:
        Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding
        (2023), algorithm 1.
    """
    dims: Dims = {}
    check("target_probs", target_probs, "N V", dims)
    check("draft_probs", draft_probs, "N V", dims)
    check("draft_tokens", draft_tokens, "N", dims)
    check("uniforms", uniforms, "N", dims)
    check("noise", noise, "N V", dims)
    check("cu_seqlens", cu_seqlens, "C", dims)
    check_dtype("draft_tokens", draft_tokens, torch.int64)
    check_dtype("cu_seqlens", cu_seqlens, torch.int32, torch.int64)
    num_requests = cu_seqlens.shape[0] - 1
    if target_probs.shape[0] == 0:
        none = torch.zeros(num_requests, dtype=torch.int32, device=target_probs.device)
        return none, none.long() - 1
    drafts = draft_tokens[1:].unsqueeze(-1)
    target = target_probs[:-1].gather(-1, drafts).squeeze(-1)
    draft = draft_probs[:-1].gather(-1, drafts).squeeze(-1)
    num_accepted = _leading_true(uniforms[:-1] * draft < target, cu_seqlens)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    rows = (cu_seqlens[:-1] + num_accepted).clamp(max=target_probs.shape[0] - 1)
    probs = target_probs[rows]
    residual = (probs - draft_probs[rows]).clamp_(min=0)
    # p == q leaves no residual; such a row rejects only by rounding, and p is then the answer.
    is_bonus = (num_accepted + 1 >= lengths) | (residual.sum(-1) == 0)
    probs = torch.where(is_bonus.unsqueeze(-1), probs, residual)
    tokens = (probs.log() + noise[rows]).argmax(-1)
    return num_accepted, torch.where(lengths > 0, tokens, -1)
