"""The same rows cut into steps in many ways: what an operator makes of a row must not change.

A walk goes through the tokens of several requests in steps. A step verifies some rows of some
requests and keeps the first of them; the others are drafts that were wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["WALKS", "Part", "Walk", "packed", "walk"]

MOST_ROWS = 8
WINDOW = 24


class Part(NamedTuple):
    """Rows of one request in a step.

    Attributes:
        request: which one.
        first: its token that the first row holds.
        kept: rows to keep, at least 1.
        size: rows, the wrong ones included.
    """

    request: int
    first: int
    kept: int
    size: int


class Walk(NamedTuple):
    """How rows are cut into steps.

    Attributes:
        most: most rows to keep of a request; a random number up to it unless `is_greedy`.
        wrong: most wrong rows behind them.
        is_greedy: whether every step keeps as many as it may.
        presence: how probable it is that a request takes part in a step.
        seed: of what is random.
    """

    most: int
    wrong: int = 0
    is_greedy: bool = True
    presence: float = 1.0
    seed: int = 0


WALKS = {
    "one by one": Walk(1),
    "eight at a time": Walk(8),
    "three at a time": Walk(3),
    "one of eight": Walk(1, wrong=7),
    "random": Walk(8, wrong=7, is_greedy=False, presence=0.7, seed=1),
    "random again": Walk(5, wrong=2, is_greedy=False, presence=0.4, seed=2),
}


def walk(how: Walk, lengths: Sequence[int]) -> Iterator[list[Part]]:
    """Yield steps until every request has gone through its tokens; borders are never crossed."""
    rng, done = random.Random(how.seed), [0] * len(lengths)
    while any(n < length for n, length in zip(done, lengths, strict=True)):
        parts = []
        for request in rng.sample(range(len(lengths)), len(lengths)):
            left, room = lengths[request] - done[request], WINDOW - done[request] % WINDOW
            if left and rng.random() < how.presence:
                most = min(how.most, room, left)
                kept = most if how.is_greedy else rng.randint(1, most)
                wrong = how.wrong if how.is_greedy else rng.randint(0, how.wrong)
                size = min(kept + wrong, room, MOST_ROWS)
                parts.append(Part(request, done[request], kept, size))
                done[request] += kept
        if parts:
            yield parts


def packed(parts: Sequence[Part], tokens: Tensor, wrong: Tensor) -> Tensor:
    """Pack the rows of a step from tokens [B, L, ...] and wrong rows [M, ...], M at least 8."""
    pieces = []
    for request, first, kept, size in parts:
        pieces += [tokens[request, first : first + kept], wrong[: size - kept]]
    return torch.cat(pieces)
