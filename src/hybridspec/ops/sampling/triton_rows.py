"""Shared by the kernels that choose tokens: winners of a row, and the mass above a token."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.sampling.triton_tiles import (
    NOTHING,
    exp2,
    load_tile,
    noise_scale,
    score_bounds,
    tile_powers,
    tile_winners,
)

__all__ = [
    "BROKEN",
    "MARGIN",
    "kth_largest",
    "load_columns",
    "load_row",
    "mass_above",
    "next_winner",
    "to_key",
    "to_logit",
    "verdict",
]

BROKEN: tl.constexpr = tl.constexpr(float("inf"))
# Of a row's mass: quick sums are wrong by less than a sixth of it.
MARGIN: tl.constexpr = tl.constexpr(2.0**-14)


@triton.jit
def to_key(x):
    """Integer that orders like the number, and back."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def to_logit(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def kth_largest(x, largest, k):
    """The largest number that at least k of `x` reach, or so; -inf if there is none.

    It is at most the k-th largest of them, and as many reach it.
    """
    low = to_key(tl.full([], NOTHING, tl.float32)).to(tl.int64)
    high = to_key(largest).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        count = tl.sum((x >= to_logit(middle.to(tl.int32))).to(tl.int32), 0)
        low = tl.where(count >= k, middle, low)
        # With exactly so many there is nothing left to find.
        high = tl.where(count == k, middle + 1, tl.where(count > k, high, middle))
    return to_logit(low.to(tl.int32))


@triton.jit
def load_columns(row, slot, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr):
    """What the noise of a row needs: 1 / temperature, c, seed and position."""
    inverse, scale = noise_scale(tl.load(temperature_ptr + slot))
    position = tl.load(seq_len_ptr + slot) + 1 + tl.load(offsets_ptr + row)
    return inverse, scale, tl.load(seed_ptr + slot), position.to(tl.uint32)


@triton.jit
def load_row(peaks_ptr, ratios_ptr, inverse, num_tiles, TILES: tl.constexpr):
    """Largest logits of a row's tiles, and what `next_winner` begins with."""
    tiles = tl.arange(0, TILES)
    in_row = tiles < num_tiles
    peaks = tl.load(peaks_ptr + tiles, mask=in_row, other=NOTHING)
    ratios = tl.load(ratios_ptr + tiles, mask=in_row, other=0.0)
    bounds = score_bounds(ratios, peaks, inverse)
    tokens = tl.full([TILES], 0, tl.int32)
    logits = tl.full([TILES], NOTHING, tl.float32)
    return peaks, (bounds, tokens, logits, bounds, tokens, logits)


@triton.jit
def next_winner(
    row_ptr, peaks_ptr, known, bound, last_score, last_token, wants_two, inverse, scale, seed,
    position, vocab, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best token with a logit above `bound` that comes after another one: score, id, logit.

    `known` holds of each tile its best token and the one after it, each a score, an id and a logit;
    or a score that nothing exceeds, with a logit that is not above `bound`. The tile of the best is
    searched until it is known.
    """
    tiles = tl.arange(0, TILES)
    scores, tokens, logits, seconds, second_tokens, second_logits = known
    best, tile = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
    logit = tl.max(tl.where(tiles == tile, logits, NOTHING), 0)
    while (logit <= bound) & (best > NOTHING):
        score, token, logit, second, second_token, second_logit = tile_winners(
            row_ptr, tile, tl.load(peaks_ptr + tile), bound, last_score, last_token, wants_two,
            inverse, scale, seed, position, vocab, BLOCK,
        )  # fmt: skip
        is_here = tiles == tile
        scores = tl.where(is_here, score, scores)
        tokens = tl.where(is_here, token, tokens)
        logits = tl.where(is_here, logit, logits)
        seconds = tl.where(is_here, second, seconds)
        second_tokens = tl.where(is_here, second_token, second_tokens)
        second_logits = tl.where(is_here, second_logit, second_logits)
        best, tile = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        logit = tl.max(tl.where(tiles == tile, logits, NOTHING), 0)
    is_here = tiles == tile
    token = tl.max(tl.where(is_here, tokens, -1), 0)
    # Its tile goes on with the one after it; what follows that one is not known.
    scores = tl.where(is_here, seconds, scores)
    tokens = tl.where(is_here, second_tokens, tokens)
    logits = tl.where(is_here, second_logits, logits)
    second_logits = tl.where(is_here, NOTHING, second_logits)
    return best, token, logit, (scores, tokens, logits, seconds, second_tokens, second_logits)


@triton.jit
def verdict(above, below, total, top_p):
    """Whether top_p keeps a token: 1, 0, or -1 where only exact sums can say.

    `above` is a part of the mass of tokens that are more likely than it, `below` one of the others.
    """
    share = top_p.to(tl.float64)
    is_kept = below >= (1.0 - share + MARGIN) * total
    is_dropped = above >= (share + MARGIN) * total
    return tl.where(is_kept, 1, tl.where(is_dropped, 0, -1))


@triton.jit
def mass_above(
    row_ptr, peaks_ptr, pivot, largest, scale, num_tiles, vocab,
    IS_STRICT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mass of the tokens above (or not below) a pivot; that of mass.py."""
    above = tl.full([], 0, tl.int64)
    for tile in range(0, num_tiles):
        peak = tl.load(peaks_ptr + tile)
        if peak >= pivot:
            index, x = load_tile(row_ptr, tile, vocab, BLOCK)
            masses = (tile_powers(x, peak, scale) * 1073741824.0).to(tl.int32).to(tl.int64)
            weight = exp2((peak - largest) * scale).to(tl.float64)
            is_above = (x > pivot) if IS_STRICT else (x >= pivot)
            tile_sum = tl.sum(tl.where(is_above, masses, 0), 0)
            above += (tile_sum.to(tl.float64) * weight).to(tl.int64)
    return above
