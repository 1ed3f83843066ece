"""Which drafts are worth a row: the most probable ones of the whole batch, within a budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridspec.ops.verify_plan import select_rows
from hybridspec.speculate.draft import Draft

__all__ = ["plan_drafts"]


def plan_drafts(drafts: Sequence[Draft], num_rows: int, device: torch.device) -> list[int]:
    """Choose how many drafts of each request to verify.

    A draft counts only if all before it are accepted, so its worth is the product of the
    confidences up to it, and the best rows of a batch are always prefixes. The output of a request
    does not depend on this choice.

    Args:
        drafts: the drafts of each request, with confidences; missing ones are 0, those of what
            would follow the last draft are not looked at.
        num_rows: rows of the step over all requests; each request has one in any case.
        device: where the plan is made.

    Returns:
        For each request, how many of its first drafts to verify.
    """
    longest = max(len(draft.tokens) for draft in drafts)
    if longest == 0:
        return [0] * len(drafts)
    padded = [(d.confidences + [0.0] * longest)[:longest] for d in drafts]
    cu_seqlens = select_rows(
        torch.tensor(padded, device=device),
        torch.arange(len(drafts), dtype=torch.int32, device=device),
        num_rows=max(num_rows, len(drafts)),
        num_drafts=torch.tensor([len(d.tokens) for d in drafts], dtype=torch.int32, device=device),
    )
    bounds = cu_seqlens.tolist()
    return [end - begin - 1 for begin, end in zip(bounds, bounds[1:], strict=False)]
