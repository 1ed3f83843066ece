"""Drives a model over pools without an engine: prefill, verify and commit, one call each."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.models.hybrid import HybridModel
from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops
from hybridspec.runtime.pools import Pools
from hybridspec.runtime.step import Step

__all__ = ["DirectRunner"]


class DirectRunner:
    """A model with pools of its own; slots are the caller's choice.

    Args:
        model: the model to run.
        num_slots: slots of the pools.
        max_tokens: longest sequence of a slot.
        state_dtype: of the recurrent states; None: the model's, fp32 at least.
    """

    def __init__(
        self,
        model: HybridModel,
        *,
        num_slots: int = 3,
        max_tokens: int = 128,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        page_size = 16
        pages_per_slot = -(-max_tokens // page_size)
        self.model = model
        self.pools = Pools(
            model.config.pool_geometry(has_mtp=model.mtp is not None),
            num_slots=num_slots,
            num_pages=num_slots * pages_per_slot,
            page_size=page_size,
            max_pages_per_slot=pages_per_slot,
            dtype=model.dtype,
            state_dtype=state_dtype or torch.promote_types(model.dtype, torch.float32),
            device=model.device,
        )
        # Pages out of order, so that a layer that ignores the table is found out.
        pages = torch.arange(num_slots * pages_per_slot, dtype=torch.int32).flip(0)
        self.pools.page_table.copy_(pages.view(num_slots, pages_per_slot))
        self.mtp_seq_len = torch.zeros_like(self.pools.seq_len)

    def step(
        self, rows: dict[int, list[int]], *, is_prefill: bool, seq_len: Tensor | None = None
    ) -> Step:
        """Return the layout of packed rows, `rows` mapping each slot to its tokens."""
        seq_len = self.pools.seq_len if seq_len is None else seq_len
        counts = [len(tokens) for tokens in rows.values()]
        starts = [int(seq_len[slot]) for slot in rows]
        slots = torch.tensor(list(rows), dtype=torch.int32)
        num_verify_tokens = torch.tensor(counts, dtype=torch.int32)
        is_fold = torch.zeros(len(rows), dtype=torch.int8)
        if not is_prefill:
            ring_ops.decide_folds(
                self.pools.history_len,
                slots,
                num_verify_tokens,
                is_fold,
                max_window=self.pools.geometry.max_window,
            )
        return Step(
            cu_seqlens=torch.tensor([0, *counts]).cumsum(0).int(),
            slots=slots,
            positions=torch.cat(
                [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
            ),
            seq_len=seq_len,
            max_rows=max(counts),
            is_prefill=is_prefill,
            is_fold=None if is_prefill else is_fold,
        )

    @torch.inference_mode()
    def prefill(self, rows: dict[int, list[int]]) -> Tensor:
        """Store prompt rows; return the hidden states of all of them, [N, D]."""
        step = self.step(rows, is_prefill=True)
        hidden = self.model.forward(_packed(rows), step, self.pools)
        for slot, tokens in rows.items():
            self.pools.seq_len[slot] += len(tokens)
        return hidden

    @torch.inference_mode()
    def verify(self, rows: dict[int, list[int]], num_committed: list[int]) -> Tensor:
        """Append rows, keep the first `num_committed` of each; return all hidden states."""
        step = self.step(rows, is_prefill=False)
        pools = self.pools
        hidden = self.model.forward(_packed(rows), step, pools)
        ring_ops.commit(
            pools.seq_len,
            pools.ring_start,
            pools.history_len,
            step.slots,
            step.is_fold,
            step.cu_seqlens.diff(),
            torch.tensor(num_committed, dtype=torch.int32),
            ring_capacity=pools.geometry.ring_capacity,
        )
        return hidden

    @torch.inference_mode()
    def draft(self, rows: dict[int, list[int]], hidden: Tensor, *, is_prefill: bool) -> Tensor:
        """Run the draft head over rows and move its cursor over all of them; [N, D]."""
        step = self.step(rows, is_prefill=is_prefill, seq_len=self.mtp_seq_len)
        pools = self.pools
        out = self.model.mtp.forward(_packed(rows), hidden, step, pools.kv[-1], pools.page_table)
        for slot, tokens in rows.items():
            self.mtp_seq_len[slot] += len(tokens)
        return out

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the model's logits."""
        return self.model.logits(hidden)

    def fold_all(self, slot: int) -> None:
        """Fold the live window of a slot into its checkpoint and empty the window."""
        slots = torch.tensor([slot], dtype=torch.int32)
        is_fold = torch.ones(1, dtype=torch.int8)
        for pool in self.pools.gdn:
            gated_delta_rule.fold(
                pool.state, pool.ring, slots, is_fold=is_fold, state_scale=pool.state_scale
            )
        self.pools.ring_start[slot] += self.pools.history_len[slot]
        self.pools.ring_start[slot] %= self.pools.geometry.ring_capacity
        self.pools.history_len[slot] = 0


def _packed(rows: dict[int, list[int]]) -> Tensor:
    return torch.tensor([token for tokens in rows.values() for token in tokens])
