"""Digests of the logits and states that an engine's steps compute, made where they run.

A digest is a sum of the bits of each element times an odd number of its own, modulo 2^64: no single
element can differ unseen, and several only by an accident of one in 2^64. Captured steps make them
too, so nothing waits and no logit has to be copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridspec.engine.engine import Engine
from hybridspec.engine.request import Request
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import GdnMemory
from hybridspec.speculate import Asks, Decoder, choose
from hybridspec.speculate.draft import wanted_drafts

__all__ = ["HEADER", "KEPT", "KnownDrafter", "Recorder"]

# What is kept of a request at its end: two numbers, then digests for each recurrent layer.
HEADER = ("tokens", "rows of the window")
KEPT = ("state", "keys", "corrections", "decays", "inputs of the convolution")


def bits(values: Tensor) -> Tensor:
    """Return the bits of each element as an integer, int64."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.contiguous().view(kind).long()


class Recorder:
    """Digests of what a step computes, by slot and position of the token that is chosen.

    A row whose draft is rejected leaves a digest at a position that is not committed yet; the step
    that decodes the position again writes over it. So behind the last step every committed
    position has the digest of the row that its token was chosen from.

    Args:
        size: slots, positions of a request, words of the vocabulary, and requests.
        device: where engines run.
    """

    def __init__(
        self, slots: int, positions: int, vocab: int, requests: int, device: torch.device
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.device = device
        self.table = zeros(slots + 1, positions)  # the last row is nobody's
        self.known = zeros(slots + 1, positions + 16)
        self.logits = zeros(requests, positions)
        self.states: dict[int, Tensor] = {}
        self._columns = self._odd(vocab)
        self._elements = self._columns
        self._index: dict[Request, int] = {}
        self._choose_tokens, self._choose = choose.choose_tokens, choose.choose_and_accept

    def _odd(self, count: int) -> Tensor:
        drawn = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(0))
        return (2 * drawn + 1).to(self.device)

    def choose_and_accept(
        self, decoder: Decoder, hidden: Tensor, rows: Step, asks: Asks, *, seq_len: Tensor
    ) -> Any:
        """Note which rows are padding, then do what it stands for."""
        self._sources = rows.sources
        return self._choose(decoder, hidden, rows, asks, seq_len=seq_len)

    def choose_tokens(
        self, decoder: Decoder, logits: Tensor, slots: Tensor, offsets: Tensor, asks: Asks,
        *, seq_len: Tensor,
    ) -> Tensor:  # fmt: skip
        """Digest the logits, then do what it stands for."""
        owners = torch.where(self._sources < 0, -1, slots)
        newest = seq_len.index_select(0, slots.clamp(min=0))
        places = (newest + 1 + offsets).clamp(0, self.table.shape[1] - 1).long()
        rows = torch.where(owners < 0, self.table.shape[0] - 1, owners).long()
        self.table.index_put_((rows, places), (bits(logits) * self._columns).sum(-1))
        return self._choose_tokens(decoder, logits, slots, offsets, asks, seq_len=seq_len)

    def follow(
        self, engine: Engine, requests: dict[int, Request], drafts: Sequence[Sequence[int]]
    ) -> None:
        """Keep what there is of these requests when they give up their slots.

        Args:
            engine: where they will run.
            requests: by their numbers.
            drafts: for each number the tokens that `KnownDrafter` is to propose.
        """
        scheduler, runner = engine.scheduler, engine.runner
        free, write = scheduler._free, runner.write
        self._index = {request: i for i, request in requests.items()}
        self.states.clear()
        sizes = [t[0].numel() for m in engine.pools.of_kind(GdnMemory) for t in kept_parts(m)]
        if max(sizes) > len(self._elements):
            self._elements = self._odd(max(sizes))

        def freed(request: Request) -> None:
            if request.slot is not None and request in self._index:
                self._end(engine, self._index[request], request.slot)
            free(request)

        def written(admitted: Sequence[Request]) -> None:
            write(admitted)
            for request in admitted:
                first, tokens = len(request.prompt_token_ids), drafts[self._index[request]]
                where = self.known[request.slot, first : first + len(tokens)]
                where.copy_(torch.tensor(tokens, dtype=torch.int64))

        scheduler._free = freed  # type: ignore[method-assign]
        runner.write = written  # type: ignore[method-assign]

    @torch.inference_mode()
    def _end(self, engine: Engine, index: int, slot: int) -> None:
        """Keep a request's digests, and digest what its slot holds; nothing is waited for."""
        self.logits[index].copy_(self.table[slot])
        self.table[slot].zero_()
        pools, found = engine.pools, []
        length, live = pools.seq_len[slot], pools.history_len[slot]
        places = torch.arange(pools.ring_capacity, device=self.device)
        window = (pools.ring_start[slot] + places) % pools.ring_capacity
        for memory in pools.of_kind(GdnMemory):
            state, *ring, conv = (part[slot] for part in kept_parts(memory))
            found.append(self._digest(bits(state)))
            for rows in ring:  # [H, R, ...]; those that are not live may hold anything
                taken = bits(rows.index_select(1, window)).movedim(1, -1)
                found.append(self._digest(torch.where(places < live, taken, 0)))
            # Three inputs in front of the next token.
            last = (length - 1 - torch.arange(3, device=self.device)) % conv.shape[0]
            found.append(self._digest(bits(conv.index_select(0, last))))
        self.states[index] = torch.stack([length.long(), live.long(), *found])

    def _digest(self, values: Tensor) -> Tensor:
        return (values.flatten() * self._elements[: values.numel()]).sum()

    def found(self, requests: dict[int, Request]) -> dict[int, tuple[list[int], list[int]]]:
        """Return digests of each request's tokens, and of what was kept unless it was dropped."""
        logits, found = self.logits.tolist(), {}
        for i, request in requests.items():
            first = len(request.prompt_token_ids)
            mine = logits[i][first : first + request.num_generated]
            is_whole = request.finish_reason == "length"
            found[i] = mine, self.states[i].tolist() if is_whole else []
        return found


def kept_parts(memory: GdnMemory) -> tuple[Tensor, ...]:
    """State, keys, corrections and decays of the ring, inputs of the convolution."""
    ring = memory.ring
    return memory.state, ring.k, ring.u, ring.cum_log_decay, memory.conv_ring  # type: ignore[union-attr]


class KnownDrafter:
    """Proposes what stands in a table of slots and positions."""

    def __init__(self, known: Tensor) -> None:
        self.known = known

    def absorb(self, next_tokens: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Return what came; arguments as in `Drafter`."""
        return hidden

    def propose(
        self, decoder: Decoder, last_hidden: Tensor, slots: Tensor, asks: Asks, num_drafts: int
    ) -> None:
        """Store the next tokens of each slot; arguments as in `Drafter`."""
        requests, k = decoder.requests, decoder.requests.most_drafts
        wanted = wanted_drafts(decoder, slots, num_drafts)
        newest = decoder.pools.seq_len.index_select(0, slots.clamp(min=0)).long()
        rows = torch.where(slots < 0, self.known.shape[0] - 1, slots).long()
        places = newest.unsqueeze(-1) + 1 + torch.arange(k, device=slots.device)
        places = places.clamp(max=self.known.shape[1] - 1)
        target = requests.rows_of(slots).long()
        requests.num_drafts.index_copy_(0, target, wanted)
        drafts = self.known.index_select(0, rows).gather(1, places)
        requests.next_tokens[:, 1:].index_copy_(0, target, drafts)
        sure = (places * 40503 % 997).float() / 1000  # any, so that budgets choose
        requests.confidences.index_copy_(0, target, sure)
