"""Stochastic rounding of folded states, as `rounding.py` defines it."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fold_words", "round_by_chance"]


@triton.jit
def fold_words(chance, element):
    """Random word of every element; `chance` is where the seed is, slot and first ring row."""
    seed_ptr, slot, start = chance
    counter = element.to(tl.uint32)
    zero = counter * 0
    words, _, _, _ = tl.philox(
        tl.load(seed_ptr), counter, zero + slot.to(tl.uint32), zero + start, zero
    )
    return words


@triton.jit
def round_by_chance(x, words, DTYPE: tl.constexpr):
    """Round fp32 numbers to 16 bits: up in magnitude if the rest exceeds bits of a word."""
    IS_FP16: tl.constexpr = DTYPE.is_fp16()
    MASK: tl.constexpr = 0x1FFF if IS_FP16 else 0xFFFF
    bits = x.to(tl.uint32, bitcast=True) + (words & MASK)
    rounded = (bits & (0xFFFFFFFF - MASK)).to(tl.float32, bitcast=True)
    magnitude = tl.abs(x)
    if IS_FP16:
        share = words.to(tl.float32) * 2.3283064365386963e-10
        steps = tl.floor(magnitude * 16777216.0 + share) * 5.9604644775390625e-08
        steps = tl.where(x < 0, -steps, steps)
        rounded = tl.where(magnitude < 6.103515625e-05, steps, rounded)
        rounded = tl.where(magnitude > 65504.0, x, rounded)
    return tl.where(magnitude < float("inf"), rounded, x).to(DTYPE)
