"""Drives a model over pools without an engine: prefill, verify and commit, one call each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybridspec.models.hybrid import HybridModel
from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import GdnMemory, MemoryOptions, Pools

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
        options = MemoryOptions(
            dtype=model.dtype,
            state_dtype=state_dtype or torch.promote_types(model.dtype, torch.float32),
        )
        self.pools = Pools(
            model.memory_specs(options),
            num_slots=num_slots,
            num_pages=num_slots * pages_per_slot,
            page_size=page_size,
            max_pages_per_slot=pages_per_slot,
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
        step = Step.of_rows(
            list(rows),
            [len(tokens) for tokens in rows.values()],
            [int(seq_len[slot]) for slot in rows],
            torch.tensor([token for tokens in rows.values() for token in tokens]),
            is_prefill=is_prefill,
        )
        if not is_prefill:
            ring_ops.decide_folds(
                self.pools.history_len,
                step.slots,
                step.num_verify_tokens,
                step.is_fold,
                max_window=self.pools.max_window,
            )
        return step

    @torch.inference_mode()
    def prefill(self, rows: dict[int, list[int]]) -> Tensor:
        """Store prompt rows; return the hidden states of all of them, [N, D]."""
        step = self.step(rows, is_prefill=True)
        hidden = self.model.forward(step, self.pools.memories)
        for slot, tokens in rows.items():
            self.pools.seq_len[slot] += len(tokens)
        return hidden

    @torch.inference_mode()
    def verify(self, rows: dict[int, list[int]], num_committed: list[int]) -> Tensor:
        """Append rows, keep the first `num_committed` of each; return all hidden states."""
        step = self.step(rows, is_prefill=False)
        pools = self.pools
        hidden = self.model.forward(step, pools.memories)
        ring_ops.commit(
            pools.seq_len,
            pools.ring_start,
            pools.history_len,
            step.slots,
            step.is_fold,
            step.num_verify_tokens,
            torch.tensor(num_committed, dtype=torch.int32),
            ring_capacity=pools.ring_capacity,
        )
        return hidden

    @torch.inference_mode()
    def draft(self, rows: dict[int, list[int]], hidden: Tensor, *, is_prefill: bool) -> Tensor:
        """Run the draft head over rows and move its cursor over all of them; [N, D]."""
        step = self.step(rows, is_prefill=is_prefill, seq_len=self.mtp_seq_len)
        memory = replace(self.pools.head_memory, seq_len=self.mtp_seq_len)
        out = self.model.mtp.forward(step.token_ids, hidden, step, memory)
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
        for memory in self.pools.of_kind(GdnMemory):
            gated_delta_rule.fold(
                memory.state, memory.ring, slots, is_fold=is_fold, state_scale=memory.state_scale
            )
        self.pools.ring_start[slot] += self.pools.history_len[slot]
        self.pools.ring_start[slot] %= self.pools.ring_capacity
        self.pools.history_len[slot] = 0
