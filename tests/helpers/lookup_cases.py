"""Logs of tokens in scattered pages, to look up in."""

from __future__ import annotations

import random

import torch
from torch import Tensor

__all__ = ["random_text", "to_pages"]


def random_text(rng: random.Random, longest: int) -> list[int]:
    """Return a text that repeats itself in some way, or not."""
    length = rng.choice([1, 2, 3, 4, rng.randrange(1, 60), rng.randrange(1, longest)])
    few = rng.choice([1, 2, 3, 50])
    text: list[int] = []
    while len(text) < length:
        if text and rng.random() < 0.3:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randrange(1, 40)]
        text.append(rng.randrange(few) * 65537)
    return text[:length]


def to_pages(texts: list[list[int]], page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay texts out in pages in random order: token pages, page table and seq_len."""
    most = max(-(-len(text) // page_size) for text in texts)
    pages = torch.randperm(len(texts) * most, generator=torch.Generator().manual_seed(0))
    page_table = pages.view(len(texts), most).to(torch.int32)
    token_pages = torch.full((len(pages), page_size), -9, dtype=torch.int32)
    for slot, text in enumerate(texts):
        place = torch.arange(len(text))
        page = page_table[slot, place // page_size].long()
        token_pages[page, place % page_size] = torch.tensor(text, dtype=torch.int32)
    seq_len = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32)
    return token_pages, page_table, seq_len
