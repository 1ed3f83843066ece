"""Forward passes of one row each, for bits that do not depend on what else a step holds.

Plain PyTorch adds up a product of four rows in another order than that of one row, and promises
nothing about either. So where every bit counts, each row is a call of its own: the very calls that
plain decoding of this request alone makes. Speculation then saves no time; it changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybridspec.models import HybridModel
from hybridspec.ops.ring import commit
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import Pools

__all__ = ["forward_row_by_row", "logits_row_by_row"]


def forward_row_by_row(model: HybridModel, step: Step, pools: Pools) -> Tensor:
    """Run the trunk as `HybridModel.forward`: a request's prompt rows at once, others one by one.

    Args:
        model: the target model.
        step: layout of the rows, read on the host; in.
        pools: logs in-out; cursors in.

    Returns:
        Hidden states [N, D]; zeros in hold rows.
    """
    hidden = torch.zeros(
        step.token_ids.shape[0], model.config.hidden_size, dtype=model.dtype, device=model.device
    )
    # Within a step a row sees those before it as committed; the real cursors stay.
    seq_len, ring_start = pools.seq_len.clone(), pools.ring_start.clone()
    history_len = pools.history_len.clone()
    memories = pools.memories_at(seq_len, ring_start, history_len)
    bounds, positions = step.cu_seqlens.tolist(), step.positions.tolist()
    for slot, first, last, is_fold in zip(
        step.slots.tolist(), bounds[:-1], bounds[1:], step.is_fold.tolist(), strict=True
    ):
        if slot < 0:
            continue
        size = max(last - first, 1) if step.is_prefill else 1
        for row in range(first, last, size):
            part = Step.of_rows(
                [slot], [size], [positions[row]], step.token_ids[row : row + size],
                is_prefill=step.is_prefill,
            )  # fmt: skip
            marks = torch.tensor([is_fold if row == first else 0], dtype=torch.int8)
            hidden[row : row + size] = model.forward(replace(part, is_fold=marks), memories)
            if not step.is_prefill:
                counts = torch.ones(1, dtype=torch.int32)
                commit(
                    seq_len, ring_start, history_len, part.slots, marks, counts, counts.clone(),
                    ring_capacity=pools.ring_capacity,
                )  # fmt: skip
    return hidden


def logits_row_by_row(model: HybridModel, hidden: Tensor) -> Tensor:
    """Return the LM head's logits [N, vocab] of hidden states [N, D], each by a call of its own."""
    parts = [model.logits(row) for row in hidden.split(1)]
    return torch.cat(parts) if parts else model.logits(hidden)
