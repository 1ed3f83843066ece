"""Drafting with the checkpoint's own MTP head, and with whatever works on lists.

Entry i of the head's KV log pairs the target's hidden state of row i with token i+1 and predicts
token i+2. The head first runs over the rows that the target has just verified, then on its own
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
from hybridspec.models.products import BLAS
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import KvMemory, Pools
from hybridspec.speculate.choose import choose_tokens
from hybridspec.speculate.decoder import Asks, Decoder
from hybridspec.speculate.forced import ForcedAcceptance

__all__ = ["Draft", "DraftsFromLists", "ListDrafter", "MtpDrafter", "NoDrafter", "wanted_drafts"]


def wanted_drafts(decoder: Decoder, slots: Tensor, num_drafts: int) -> Tensor:
    """Return how many drafts each request can still use, [B] int32; 0 in padding.

    No more than `num_drafts` and than it wants, none past its last position, none once it is done.
    """
    requests, seq_len = decoder.requests, decoder.pools.seq_len
    rows = requests.rows_of(slots)
    newest = seq_len.index_select(0, rows.clamp(max=requests.num_slots - 1))
    room = requests.last_position.index_select(0, rows) - newest - 1
    wanted = torch.minimum(requests.draft_limit.index_select(0, rows), room)
    wanted = wanted.clamp_(min=0, max=num_drafts)
    # The scratch row is done, so padding wants nothing.
    return wanted * (requests.is_done.index_select(0, rows) == 0)


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def absorb(self, next_tokens: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Return what came; arguments as in `Drafter`."""
        return hidden

    def propose(
        self, decoder: Decoder, last_hidden: Tensor, slots: Tensor, asks: Asks, num_drafts: int
    ) -> None:
        """Do nothing; arguments as in `Drafter`."""


class MtpDrafter:
    """Drafts with one multi-token-prediction layer, fed its own outputs.

    Attributes:
        model: the target model, which owns the embedding and the LM head.
        head: the draft head.
        pools: the memories, the head's among them.
        words: ids that drafts may have, None for all: fewer words are read in less time, and the
            output does not depend on drafts.
    """

    def __init__(
        self, model: HybridModel, pools: Pools, words: Sequence[int] | None = None
    ) -> None:
        assert model.mtp is not None
        self.model = model
        self.head = model.mtp
        self.pools = pools
        self.words = None if words is None else torch.tensor(words, device=model.device)
        self._rows = None if self.words is None else model.head[self.words]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, vocab] of the head's hidden states, -inf for words it does not know."""
        if self.words is None or self._rows is None:
            return self.model.logits(hidden)
        known = BLAS.logits(hidden, self._rows)
        logits = known.new_full((hidden.shape[0], self.model.head.shape[0]), -torch.inf)
        return logits.index_copy_(1, self.words, known)

    @property
    def memory(self) -> KvMemory:
        """The head's pages and the cursors of the target, which it follows."""
        memory = self.pools.head_memory
        assert memory is not None
        return memory

    def absorb(self, next_tokens: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Run the head over rows of the target.

        Args:
            next_tokens: the token after each row, [N] int64.
            hidden: the target's hidden states after its final norm, [N, D].
            step: layout of the rows; the cursors are still those *before* these rows.

        Returns:
            The head's hidden states [N, D].
        """
        return self.head.forward(next_tokens, hidden, step, self.memory)

    def propose(
        self, decoder: Decoder, last_hidden: Tensor, slots: Tensor, asks: Asks, num_drafts: int
    ) -> None:
        """Propose tokens one after the other and store them; arguments as in `Drafter`."""
        requests, pools = decoder.requests, self.pools
        wanted = wanted_drafts(decoder, slots, num_drafts)
        rows = requests.rows_of(slots).long()
        requests.num_drafts.index_copy_(0, rows, wanted)
        counts = None if slots.is_cuda else wanted.tolist()
        hidden, tokens, cursor = last_hidden, slots, pools.seq_len.clone()
        memory, step = replace(self.memory, seq_len=cursor), None
        num_drafts = min(num_drafts, requests.most_drafts)
        if decoder.forced is not None and num_drafts:
            _store_forced(decoder, decoder.forced, slots, num_drafts)
        has_confidences = asks.has_confidences and decoder.forced is None
        for j in range(num_drafts):
            if counts is not None and min(counts, default=0) <= j:
                # The shapes of a device are fixed; here dead rows cost time.
                keep = [b for b, count in enumerate(counts) if count > j]
                counts = [counts[b] for b in keep]
                if not keep:
                    return
                slots, rows, hidden, tokens = slots[keep], rows[keep], hidden[keep], tokens[keep]
                step = None
            live = slots if counts is not None else torch.where(wanted > j, slots, -1)
            if j > 0:
                step = _at_cursor(step or Step.single_rows(slots), live, cursor)
                hidden = self.head.forward(tokens, hidden, step, memory)
                cursor += 1
            logits = self.logits(hidden)
            probs = torch.softmax(logits, -1) if has_confidences else None
            tokens = choose_tokens(
                decoder, logits, live, torch.full_like(live, j), asks, seq_len=pools.seq_len
            ).clamp_(min=0)
            requests.next_tokens.select(1, 1 + j).index_copy_(0, rows, tokens)
            if probs is not None:
                sure = probs.gather(1, tokens[:, None])[:, 0]
                requests.confidences.select(1, j).index_copy_(0, rows, sure)


def _store_forced(
    decoder: Decoder, forced: ForcedAcceptance, slots: Tensor, num_drafts: int
) -> None:
    """Store confidences for as many drafts as there can be; those of none are not looked at."""
    requests, first = decoder.requests, slots.clamp(min=0).unsqueeze(-1)
    newest = decoder.pools.seq_len[first].long()
    sure = forced.confidences(first, newest + torch.arange(1, num_drafts + 1, device=slots.device))
    stored = requests.confidences.narrow(1, 0, num_drafts)
    stored.index_copy_(0, requests.rows_of(slots).long(), sure)


def _at_cursor(step: Step, slots: Tensor, cursor: Tensor) -> Step:
    """Put the row of each request at its cursor; -1 is padding."""
    if slots.is_cuda:
        position = torch.where(slots >= 0, cursor.index_select(0, slots.clamp(min=0)), 0)
    else:
        position = cursor.index_select(0, slots)
    return replace(step, slots=slots, kv_len=position + 1, positions=position.long())


@dataclass(frozen=True, slots=True)
class Draft:
    """What is proposed for one request.

    Attributes:
        tokens: proposed tokens, in order.
        confidences: the drafter's probability of each; may be empty unless requested.
    """

    tokens: list[int]
    confidences: list[float]


class ListDrafter(Protocol):
    """Proposes lists of tokens, on the host."""

    def propose(
        self,
        slots: Sequence[int],
        histories: Sequence[array[int]],
        num_drafts: Sequence[int],
        *,
        has_confidences: bool,
    ) -> list[Draft]:
        """Propose at most `num_drafts[b]` tokens after each history (prompt and output so far)."""
        ...


class DraftsFromLists:
    """Lets a drafter that works on lists take part; every step then waits for the host.

    Attributes:
        inner: the drafter.
    """

    def __init__(self, inner: ListDrafter) -> None:
        self.inner = inner

    def absorb(self, next_tokens: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Do nothing: the tokens come with `propose`."""
        return hidden

    def propose(
        self, decoder: Decoder, last_hidden: Tensor, slots: Tensor, asks: Asks, num_drafts: int
    ) -> None:
        """Read the requests' tokens, ask, and store the drafts; arguments as in `Drafter`.

        Raises:
            ValueError: if a draft is not in the vocabulary.
        """
        requests, vocab = decoder.requests, decoder.model.config.vocab_size
        wanted = wanted_drafts(decoder, slots, num_drafts).tolist()
        numbers = slots.tolist()
        asking = [b for b, count in enumerate(wanted) if count > 0]
        requests.num_drafts.index_fill_(0, requests.rows_of(slots).long(), 0)
        drafts = self.inner.propose(
            [numbers[b] for b in asking],
            [array("i", decoder.history(numbers[b], decoder.pools.seq_len)) for b in asking],
            [wanted[b] for b in asking],
            has_confidences=asks.has_confidences,
        )
        for b, draft in zip(asking, drafts, strict=True):
            slot, given_tokens = numbers[b], draft.tokens[: wanted[b]]
            count = len(given_tokens)
            if not all(0 <= token < vocab for token in given_tokens):  # rows of a table
                raise ValueError(f"drafter: expected tokens in 0..{vocab - 1}, got {given_tokens}")
            tokens = torch.tensor(given_tokens, dtype=torch.int64)
            requests.next_tokens[slot, 1 : 1 + count] = tokens.to(slots.device)
            if draft.confidences:
                # What is missing counts as 0: those drafts come last.
                sure = (draft.confidences + [0.0] * count)[:count]
                given = torch.tensor(sure, dtype=torch.float32)
                requests.confidences[slot, :count] = given.to(slots.device)
            requests.num_drafts[slot] = count
