"""Requests in the middle of decoding, with all that choosing their next tokens looks at."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops.sampling import SamplingTable, SamplingUses, choose
from hybridspec.runtime import SamplingPool, SlotOptions

__all__ = ["ChoiceCase", "random_case", "random_options"]

PAGE_SIZE = 4


def random_options(rng: random.Random, vocab: int, chance: float, few: list[int]) -> SlotOptions:
    """Return options of which each is on with the given chance; `few` are the text's tokens."""

    def some(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    def word() -> list[int]:
        return [rng.choice(few) for _ in range(rng.choice([0, 1, 1, 2, 3]))] + some(1)

    makers: dict[str, Any] = {
        "temperature": lambda: rng.choice([0.3, 1.0, 1.7]),
        "top_k": lambda: rng.choice([1, 5, 40, 2**31 - 1]),
        "top_p": lambda: rng.choice([1e-6, 0.5, 0.9, 0.999]),
        "min_p": lambda: rng.choice([0.02, 0.2, 1.0]),
        "repetition": lambda: rng.choice([0.7, 1.1, 1.8]),
        "frequency": lambda: rng.choice([-1.0, 0.3, 2.0]),
        "presence": lambda: rng.choice([-1.5, 0.6, 2.0]),
        "bias": lambda: {token: rng.choice([-100.0, -2.5, 3.0]) for token in some(6)},
        "bad_words": lambda: [word() for _ in range(vocab)],
        "allowed": lambda: some(vocab // 2),
        "ends": lambda: some(vocab // 4),
        "ends_from": lambda: rng.randrange(30),
    }
    chosen = {name: make() for name, make in makers.items() if rng.random() < chance}
    return SlotOptions(seed=rng.randrange(2**63), **chosen)


@dataclass
class ChoiceCase:
    """A batch of rows and everything else that `choose` takes.

    `histories` holds each slot's tokens up to its newest one, `output` how many of them it said.
    """

    pool: SamplingPool
    histories: list[list[int]]
    logits: Tensor
    slots: Tensor
    offsets: Tensor
    seq_len: Tensor
    drafts: Tensor
    token_pages: Tensor
    page_table: Tensor

    @property
    def table(self) -> SamplingTable:
        return self.pool.table

    def tokens_before(self, row: int) -> list[int]:
        """Return all tokens in front of the one that a row chooses."""
        slot, offset = int(self.slots[row]), int(self.offsets[row])
        return self.histories[slot] + self.drafts[slot, :offset].tolist()

    def choose(self, rows: slice | list[int] = slice(None), **options: Any) -> Tensor:
        """Choose tokens for some of the rows."""
        return choose(
            self.logits[rows],
            self.slots[rows],
            self.offsets[rows],
            self.table,
            self.seq_len,
            self.drafts,
            self.token_pages,
            self.page_table,
            **options,
        )

    def uses(self) -> SamplingUses:
        """What the batch needs, as an engine would say it."""
        return self.pool.uses([slot for slot in self.slots.tolist() if slot >= 0])


def random_case(
    seed: int, *, vocab: int = 45, slots: int = 6, drafts: int = 3, chance: float = 0.4
) -> ChoiceCase:
    """Return slots with random options and texts, one row per slot and number of drafts."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    pool = SamplingPool(slots, vocab)
    histories = []
    pages = list(range(10 * slots))
    rng.shuffle(pages)
    page_table = torch.tensor(pages, dtype=torch.int32).view(slots, 10)
    token_pages = torch.full((10 * slots, PAGE_SIZE), -7, dtype=torch.int32)
    for slot in range(slots):
        few = [rng.randrange(vocab) for _ in range(rng.choice([2, 5, 30]))]
        prompt = [rng.choice(few) for _ in range(rng.randrange(1, 12))]
        output = [rng.choice(few) for _ in range(rng.randrange(1, 12))]
        options = random_options(rng, vocab, chance, few)
        assert pool.write(slot, options, prompt=prompt, output=output)
        histories.append(prompt + output)
        for place, token in enumerate(histories[-1]):
            token_pages[page_table[slot, place // PAGE_SIZE], place % PAGE_SIZE] = token
    rows = [(slot, offset) for slot in range(slots) for offset in range(drafts + 1)]
    rng.shuffle(rows)
    logits = torch.randn(len(rows), vocab, generator=generator) * 3
    return ChoiceCase(
        pool=pool,
        histories=histories,
        logits=logits,
        slots=torch.tensor([slot for slot, _ in rows], dtype=torch.int32),
        offsets=torch.tensor([offset for _, offset in rows], dtype=torch.int32),
        seq_len=torch.tensor([len(text) - 1 for text in histories], dtype=torch.int32),
        drafts=torch.tensor(
            [[rng.choice(text) for _ in range(drafts)] for text in histories], dtype=torch.int64
        ).view(slots, drafts),
        token_pages=token_pages,
        page_table=page_table,
    )
