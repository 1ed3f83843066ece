"""Prompt lookup on a CPU: bytes are searched faster than tensors or lists."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hybridspec.ops._library import Written
from hybridspec.ops.lookup.call import Found, Log, Search

__all__ = ["look_up"]

_SIZE = 4  # bytes of a token


def look_up(log: Log, slots: Tensor, search: Search, found: Written[Found]) -> None:
    """Fill drafts, num and agreement; see look_up.py."""
    token_pages, page_table, seq_len = log
    drafts, num, agreement = found
    count, page_size = drafts.shape[1], token_pages.shape[1]
    continued: list[tuple[list[int], int]] = []
    for slot in slots.tolist():
        length = int(seq_len[slot]) + 1 if slot >= 0 else 0
        if length <= search.num_tokens or not count:
            continued.append(([], 0))
            continue
        pages = page_table[slot, : -(-length // page_size)]
        held = token_pages[pages].contiguous().cpu()
        text = ctypes.string_at(held.data_ptr(), _SIZE * length)
        best, agreeing = _best_place(text, *search)
        tokens = memoryview(text).cast("i")
        period = length - best
        drafted = [tokens[best + j % period] for j in range(count)] if agreeing else []
        continued.append((drafted, agreeing))
    nothing = [-1] * count
    drafts.copy_(torch.tensor([tokens or nothing for tokens, _ in continued]).view_as(drafts))
    num.copy_(torch.tensor([len(tokens) for tokens, _ in continued]))
    agreement.copy_(torch.tensor([agreeing for _, agreeing in continued]))


def _best_place(
    text: bytes, num_tokens: int, max_places: int, max_agreement: int
) -> tuple[int, int]:
    """Where the text goes on at the best place, in tokens, and how many agree there."""
    tokens = memoryview(text).cast("i")
    wanted = text[-num_tokens * _SIZE :]
    best = agreement = 0
    end = len(text) - _SIZE
    for _ in range(max_places):
        place = text.rfind(wanted, 0, end)
        # A hit must lie on the border of a token.
        while place % _SIZE and place >= 0:
            place = text.rfind(wanted, 0, place + len(wanted) - 1)
        if place < 0:
            break
        following = place // _SIZE + num_tokens
        most = min(following, max_agreement)
        agreeing = num_tokens
        while agreeing < most and tokens[following - 1 - agreeing] == tokens[-1 - agreeing]:
            agreeing += 1
        if agreeing > agreement:
            best, agreement = following, agreeing
        end = place + len(wanted) - 1
    return best, agreement
