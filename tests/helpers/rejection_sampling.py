"""How many drafts survive: the rule of drafts that are the plain tokens, and the textbook's."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accept_drafts", "rejection_sample"]


def accept_drafts(sampled: Tensor, draft_tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Count the drafts that equal what was sampled at the row before, and so do all before them.

    Args:
        sampled: token sampled after each row, [N].
        draft_tokens: token fed to each row, [N]; a request's first is not looked at.
        cu_seqlens: row offsets of the requests, [B+1].

    Returns:
        Accepted drafts per request, [B], int32, at most T_b - 1, and 0 where T_b = 0.
    """
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

    Source:
        Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding
        (2023), algorithm 1.
    """
    num_requests = cu_seqlens.shape[0] - 1
    if target_probs.shape[0] == 0:
        none = torch.zeros(num_requests, dtype=torch.int32, device=target_probs.device)
        return none, none.long() - 1
    drafts = draft_tokens[1:].unsqueeze(-1)
    target = target_probs[:-1].gather(-1, drafts).squeeze(-1)
    draft = draft_probs[:-1].gather(-1, drafts).squeeze(-1)
    is_accepted = uniforms[:-1] * draft < target
    sampled = torch.where(is_accepted, draft_tokens[1:], -1)
    sampled = torch.cat((sampled, draft_tokens[:1]))
    num_accepted = accept_drafts(sampled, draft_tokens, cu_seqlens)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    rows = (cu_seqlens[:-1] + num_accepted).clamp(max=target_probs.shape[0] - 1)
    probs = target_probs[rows]
    residual = (probs - draft_probs[rows]).clamp_(min=0)
    # p == q leaves no residual; such a row rejects only by rounding, and p is then the answer.
    is_bonus = (num_accepted + 1 >= lengths) | (residual.sum(-1) == 0)
    probs = torch.where(is_bonus.unsqueeze(-1), probs, residual)
    tokens = (probs.log() + noise[rows]).argmax(-1)
    return num_accepted, torch.where(lengths > 0, tokens, -1)
