"""Requests in the middle of decoding, with all that choosing their next tokens looks at."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops.sampling import SamplingTable, SamplingUses, choose
from hybridspec.runtime import SamplingPool, SlotOptions

__all__ = ["FILTER_KINDS", "ChoiceCase", "filter_case", "random_case", "random_options"]

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
        "bad_words": lambda: [word() for _ in range(min(vocab, 60))],
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

    def choose(
        self, rows: slice | list[int] = slice(None), *, device: str = "cpu", **options: Any
    ) -> Tensor:
        """Choose tokens for some of the rows."""
        tensors = (self.seq_len, self.drafts, self.token_pages, self.page_table)
        table = SamplingTable.of(tensor.to(device) for tensor in self.table.tensors())
        return choose(
            *(tensor[rows].to(device) for tensor in (self.logits, self.slots, self.offsets)),
            table if device != "cpu" else self.table,
            *(tensor.to(device) for tensor in tensors),
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


FILTER_KINDS = ("none", "top_k", "top_p", "min_p", "top_k and top_p", "all", "extreme")


def filter_case(seed: int, kind: str, *, num_rows: int, vocab: int, spread: float) -> ChoiceCase:
    """Return rows with a temperature and filters, one row per slot."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    pool = SamplingPool(num_rows, vocab)
    extreme = kind == "extreme"
    for slot in range(num_rows):
        options: dict[str, Any] = {"temperature": rng.choice([0.3, 0.8, 1.0, 1.5])}
        if kind in ("top_k", "top_k and top_p", "all"):
            options["top_k"] = rng.choice([1, 2, 20, 300, vocab - 1, vocab + 5])
        if kind in ("top_p", "top_k and top_p", "all"):
            options["top_p"] = rng.choice([0.3, 0.8, 0.95, 0.999])
        if kind in ("min_p", "all"):
            options["min_p"] = rng.choice([0.001, 0.05, 0.5])
        if extreme:
            options |= {"temperature": rng.choice([1e-30, 1e-4, 1e6])}
            options |= {"top_p": rng.choice([1e-7, 0.5]), "min_p": rng.choice([0.0, 1.0])}
        pool.write(slot, SlotOptions(seed=rng.randrange(2**63), **options))
    return ChoiceCase(
        pool=pool,
        histories=[[0]] * num_rows,
        logits=torch.randn(num_rows, vocab, generator=generator) * spread,
        slots=torch.randperm(num_rows, generator=generator).int(),
        offsets=torch.zeros(num_rows, dtype=torch.int32),
        seq_len=torch.randint(0, 9000, (num_rows,), generator=generator).int(),
        drafts=torch.zeros(num_rows, 0, dtype=torch.int64),
        token_pages=torch.zeros(1, PAGE_SIZE, dtype=torch.int32),
        page_table=torch.zeros(num_rows, 1, dtype=torch.int32),
    )
