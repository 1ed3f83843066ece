"""Drafting with the checkpoint's own MTP head.

Entry i of the head's KV log pairs the target's hidden state of row i with token i+1 and predicts
token i+2. The head first runs over the rows that the target has just committed, then on its own
outputs; what it appends while drafting lies past the cursor and is overwritten by the next step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hybridspec.models import HybridModel
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import KvMemory, Pools
from hybridspec.speculate.choose import ChoiceRule, choose_tokens

__all__ = ["Draft", "Drafter", "MtpDrafter"]


@dataclass(frozen=True, slots=True)
class Draft:
    """What is proposed for one request.

    Attributes:
        tokens: proposed tokens, in order.
        confidences: the drafter's probability of each; empty if nobody asked.
    """

    tokens: list[int]
    confidences: list[float]


class Drafter(Protocol):
    """Proposes tokens; the output of a request never depends on what it proposes."""

    def absorb(self, next_tokens: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Take in rows of the target model: hidden [N, D] and the tokens [N] that follow them."""
        ...

    def propose(
        self,
        last_hidden: Tensor,
        slots: Sequence[int],
        starts: Sequence[int],
        num_drafts: Sequence[int],
        rules: Sequence[ChoiceRule],
        histories: Sequence[array[int]],
        *,
        has_confidences: bool,
    ) -> list[Draft]:
        """Propose at most `num_drafts[b]` tokens after the newest token of each request.

        `histories` are the requests' prompts and outputs so far.
        """
        ...


class MtpDrafter:
    """Drafts with one multi-token-prediction layer, fed its own outputs.

    Attributes:
        model: the target model, which owns the head, the embedding and the LM head.
        pools: the memories, the head's among them.
    """

    def __init__(self, model: HybridModel, pools: Pools) -> None:
        self.model = model
        self.pools = pools

    def absorb(self, next_tokens: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Run the head over rows of the target.

        Args:
            next_tokens: the token after each row, [N] int64.
            hidden: the target's hidden states after its final norm, [N, D].
            step: layout of the rows; the memory's cursor stands *before* them.

        Returns:
            The head's hidden states [N, D].
        """
        return self._run(next_tokens, hidden, step, self._memory)

    def propose(
        self,
        last_hidden: Tensor,
        slots: Sequence[int],
        starts: Sequence[int],
        num_drafts: Sequence[int],
        rules: Sequence[ChoiceRule],
        histories: Sequence[array[int]],
        *,
        has_confidences: bool,
    ) -> list[Draft]:
        """Propose tokens one after the other.

        Args:
            last_hidden: the head's hidden state of each request's last absorbed row, [B, D].
            slots: slot of each request.
            starts: position of the newest committed token of each request; entries up to the one
                before it are in the head's log.
            num_drafts: how many tokens to propose for each request, 0 allowed.
            rules: how each request's tokens are chosen.
            histories: not looked at; the head's log holds what it needs.
            has_confidences: whether to report the head's probability of each draft.
        """
        drafts = [Draft([], []) for _ in slots]
        active = [b for b, count in enumerate(num_drafts) if count > 0]
        if not active:
            return drafts
        hidden = last_hidden if len(active) == len(slots) else last_hidden[active]
        memory = replace(self._memory, seq_len=self.pools.seq_len.clone())
        while True:
            done = len(drafts[active[0]].tokens)
            logits = self.model.logits(hidden)
            probs = torch.softmax(logits, -1) if has_confidences else None
            tokens = choose_tokens(
                logits,
                [rules[b] for b in active],
                [starts[b] + done + 1 for b in active],
                [drafts[b].tokens for b in active],
            )
            for b, token in zip(active, tokens.tolist(), strict=True):
                drafts[b].tokens.append(token)
            if probs is not None:
                chosen = probs.gather(1, tokens[:, None])[:, 0].tolist()
                for b, confidence in zip(active, chosen, strict=True):
                    drafts[b].confidences.append(confidence)
            keep = [i for i, b in enumerate(active) if num_drafts[b] > done + 1]
            if not keep:
                return drafts
            if len(keep) < len(active):
                hidden, tokens = hidden[keep], tokens[keep]
                active = [active[i] for i in keep]
            step = Step.of_rows(
                [slots[b] for b in active],
                [1] * len(active),
                [starts[b] + done for b in active],
                tokens,
                is_prefill=False,
            )
            hidden = self._run(tokens, hidden, step, memory)
            memory.seq_len.add_(1)

    @property
    def _memory(self) -> KvMemory:
        memory = self.pools.head_memory
        assert memory is not None
        return memory

    def _run(self, tokens: Tensor, hidden: Tensor, step: Step, memory: KvMemory) -> Tensor:
        head = self.model.mtp
        assert head is not None
        return head.forward(tokens, hidden, step, memory)
