"""Stochastic rounding of folded states: up or down by chance, so that no error piles up.

Rounding to nearest loses what is small beside a state, at every fold anew. Here a number between
two neighbours becomes the upper one as often as it is near to it. The bits that decide come from a
counter-based generator: a function of seed, slot, element and of where the window began.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops.sampling.gumbel import philox

__all__ = ["ROUNDED", "fold_words", "round_by_chance"]

# Bits of a fp32 number that a dtype does not keep.
ROUNDED = {torch.bfloat16: 16, torch.float16: 13}
_SMALLEST_NORMAL, _SMALLEST, _LARGEST = 2.0**-14, 2.0**-24, 65504.0  # of fp16


def fold_words(seed: Tensor, slot: int, start: int, shape: tuple[int, ...]) -> Tensor:
    """Return a random word of every element of a slot's state.

        word = philox(key = seed, counter = (element, slot, start, 0))[0]

    Args:
        seed: [1], int64; in.
        slot: the slot.
        start: ring row at which the folded window begins.
        shape: HV, V, K; elements are numbered in this order.

    Returns:
        `shape`, int64 with values in 0..2^32-1.
    """
    count = 1
    for size in shape:
        count *= size
    elements = torch.arange(count, device=seed.device)[None]
    others = [torch.full_like(elements[:, :1], number) for number in (slot, start, 0)]
    return philox(seed, (elements, *others))[0, :, 0].view(shape)


def round_by_chance(x: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x, fp32, to a 16-bit dtype: up in magnitude if its rest exceeds bits of a word.

    Numerics:
        Exact numbers stay; the expected result is x, below the smallest normal number too. What is
        beyond the largest number is rounded to nearest; what is not finite stays.
    """
    x = x.float()
    mask = (1 << ROUNDED[dtype]) - 1
    bits = x.view(torch.int32) + (words & mask).to(torch.int32)
    rounded = (bits & ~mask).view(torch.float32)
    if dtype == torch.float16:
        steps = (x.abs().double() / _SMALLEST + words.double() / 2.0**32).floor() * _SMALLEST
        rounded = torch.where(x.abs() < _SMALLEST_NORMAL, steps.float().copysign(x), rounded)
        rounded = torch.where(x.abs() > _LARGEST, x, rounded)
    return torch.where(x.isfinite(), rounded, x).to(dtype)
