"""Choosing tokens in two launches: the logits are read once, and once more where a filter is on.

`scan_kernel` finds each tile's largest logit, mass and winner. `settle_kernel` takes the best
winner of a row and asks the filters for it; one that is dropped gives way to the best of the more
likely ones, which are the other tiles' winners but for a tile or two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tiles import (
    NOTHING,
    exp2,
    load_tile,
    noise_scale,
    tile_powers,
    tile_winner,
)

__all__ = ["scan_kernel", "settle_kernel"]

BROKEN: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def scan_kernel(
    # inputs: logits [N, V], rows [N], columns [S]
    logits_ptr, slots_ptr, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr,
    # outputs [N, tiles], and [N] zeros
    peaks_ptr, masses_ptr, scores_ptr, tokens_ptr, winners_ptr, arrived_ptr,
    vocab, num_tiles, tiles_per_program, row_stride,
    HAS_NOISE: tl.constexpr, HAS_FILTERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest logit, mass, and best score of each tile."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * tiles_per_program
    slot = tl.load(slots_ptr + row)
    if first == 0:
        tl.store(arrived_ptr + row, 0)
    if slot >= 0:
        temperature = tl.load(temperature_ptr + slot) if HAS_NOISE else 0.0
        row_ptr = logits_ptr + row * row_stride
        for tile in range(first, tl.minimum(first + tiles_per_program, num_tiles)):
            out = row * num_tiles + tile
            index, x = load_tile(row_ptr, tile, vocab, BLOCK)
            if temperature > 0:
                peak = tl.max(x, 0)
                tl.store(peaks_ptr + out, peak)
                if (peak > NOTHING) & (peak < BROKEN):
                    inverse, scale = noise_scale(temperature)
                    powers = tile_powers(x, peak, scale)
                    seed = tl.load(seed_ptr + slot)
                    position = (tl.load(seq_len_ptr + slot) + 1 + tl.load(offsets_ptr + row)).to(
                        tl.uint32
                    )
                    best, token, logit = tile_winner(
                        row_ptr, index, x, powers, peak, NOTHING, tile, inverse, seed, position,
                        BLOCK,
                    )  # fmt: skip
                    tl.store(scores_ptr + out, best)
                    tl.store(tokens_ptr + out, token)
                    tl.store(winners_ptr + out, logit)
                    if HAS_FILTERS:
                        mass = tl.sum((powers * 1073741824.0).to(tl.int32).to(tl.int64), 0)
                        tl.store(masses_ptr + out, mass)
                else:
                    tl.store(scores_ptr + out, tl.full([], NOTHING, tl.float64))
                    tl.store(winners_ptr + out, NOTHING)
                    if HAS_FILTERS:
                        tl.store(masses_ptr + out, tl.full([], 0, tl.int64))
            else:
                peak, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
                tl.store(peaks_ptr + out, peak)
                tl.store(tokens_ptr + out, tile * BLOCK + place)


@triton.jit
def mass_above(
    row_ptr, peaks_ptr, low, high, largest, scale, first, last, vocab,
    IS_STRICT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Masses of the tokens above (or not below) each of two pivots, low <= high, of some tiles."""
    above_low = tl.full([], 0, tl.int64)
    above_high = tl.full([], 0, tl.int64)
    for tile in range(first, last):
        peak = tl.load(peaks_ptr + tile)
        if peak >= low:
            index, x = load_tile(row_ptr, tile, vocab, BLOCK)
            masses = (tile_powers(x, peak, scale) * 1073741824.0).to(tl.int32).to(tl.int64)
            weight = exp2((peak - largest) * scale).to(tl.float64)
            is_low = (x > low) if IS_STRICT else (x >= low)
            is_high = (x > high) if IS_STRICT else (x >= high)
            low_sum = tl.sum(tl.where(is_low, masses, 0), 0)
            high_sum = tl.sum(tl.where(is_high, masses, 0), 0)
            above_low += (low_sum.to(tl.float64) * weight).to(tl.int64)
            above_high += (high_sum.to(tl.float64) * weight).to(tl.int64)
    return above_low, above_high


@triton.jit
def to_key(x):
    """Integer that orders like the number, and back."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def to_logit(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def least_of_top(row_ptr, peaks_ptr, peaks, largest, top_k, num_tiles, vocab, BLOCK: tl.constexpr):
    """A logit that exactly the top_k largest reach, and those that equal the last of them."""
    low = to_key(tl.full([], NOTHING, tl.float32)).to(tl.int64)
    high = to_key(largest).to(tl.int64) + 1
    if top_k <= num_tiles:
        # So many tiles reach the top_k-th largest of their largest logits, so their tokens do.
        peak_high = high
        while peak_high - low > 1:
            middle = low + (peak_high - low) // 2
            pivot = to_logit(middle.to(tl.int32))
            is_reached = tl.sum((peaks >= pivot).to(tl.int32), 0) >= top_k
            low = tl.where(is_reached, middle, low)
            peak_high = tl.where(is_reached, peak_high, middle)
    while high - low > 1:
        middle = low + (high - low) // 2
        pivot = to_logit(middle.to(tl.int32))
        count = tl.full([], 0, tl.int32)
        for tile in range(0, num_tiles):
            if tl.load(peaks_ptr + tile) >= pivot:
                index, x = load_tile(row_ptr, tile, vocab, BLOCK)
                count += tl.sum((x >= pivot).to(tl.int32), 0)
        low = tl.where(count >= top_k, middle, low)
        # With exactly so many there is nothing left to find.
        high = tl.where(count == top_k, middle + 1, tl.where(count > top_k, high, middle))
    return to_logit(low.to(tl.int32))


@triton.jit
def next_winner(
    row_ptr, peaks_ptr, scores, tokens, winners, bound, scale, inverse, seed, position, vocab,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best token with a logit above `bound`; a tile whose winner is not above it is searched."""
    tiles = tl.arange(0, TILES)
    best, tile = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
    logit = tl.max(tl.where(tiles == tile, winners, NOTHING), 0)
    while (logit <= bound) & (best > NOTHING):
        peak = tl.load(peaks_ptr + tile)
        index, x = load_tile(row_ptr, tile, vocab, BLOCK)
        powers = tile_powers(x, peak, scale)
        score, token, logit = tile_winner(
            row_ptr, index, x, powers, peak, bound, tile, inverse, seed, position, BLOCK
        )
        scores = tl.where(tiles == tile, score, scores)
        tokens = tl.where(tiles == tile, token, tokens)
        winners = tl.where(tiles == tile, logit, winners)
        best, tile = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        logit = tl.max(tl.where(tiles == tile, winners, NOTHING), 0)
    token = tl.max(tl.where(tiles == tile, tokens, -1), 0)
    return token, logit, scores, tokens, winners


@triton.jit
def best_kept(
    row_ptr, peaks_ptr, masses_ptr, parts_ptr, arrived_ptr, peaks, scores, tokens, winners, largest,
    inverse, scale, seed, position, top_k, top_p, min_p, split, num_splits, num_tiles, vocab,
    TILES: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best token that the filters keep, and whether this program is the one that knows it.

    The programs of a row share the first sums of top_p, and the last to arrive goes on alone; where
    there is a top_k, the first program does everything.
    """
    is_shared = (top_k <= 0) & (top_p < 1)
    share = (num_tiles + num_splits - 1) // num_splits
    first = tl.where(is_shared, split * share, 0)
    last = tl.where(is_shared, tl.minimum(first + share, num_tiles), num_tiles)
    is_mine = split == 0
    chosen = tl.full([], -1, tl.int32)
    if is_shared | is_mine:
        least = tl.full([], NOTHING, tl.float32)
        limit = tl.full([], BROKEN, tl.float64)
        if (top_k > 0) & (top_k < vocab):
            least = least_of_top(row_ptr, peaks_ptr, peaks, largest, top_k, num_tiles, vocab, BLOCK)
        if top_p < 1:
            tiles = tl.arange(0, TILES)
            masses = tl.load(masses_ptr + tiles, mask=tiles < num_tiles, other=0)
            weights = exp2((peaks - largest) * scale).to(tl.float64)
            total = tl.sum((masses.to(tl.float64) * weights).to(tl.int64), 0)
            if least > NOTHING:
                total, same = mass_above(
                    row_ptr, peaks_ptr, least, least, largest, scale, 0, num_tiles, vocab, False,
                    BLOCK,
                )  # fmt: skip
            limit = tl.maximum(top_p.to(tl.float64) * total.to(tl.float64), 1.0)
        bound = tl.full([], NOTHING, tl.float32)
        is_searching = True
        while is_searching:
            token, logit, scores, tokens, winners = next_winner(
                row_ptr, peaks_ptr, scores, tokens, winners, bound, scale, inverse, seed, position,
                vocab, TILES, BLOCK,
            )  # fmt: skip
            is_out = (logit < least) | (exp2((logit - largest) * scale) < min_p)
            bound = logit
            chosen = token
            is_searching = is_out
            if (top_p < 1) & (is_out == 0):
                # The one that would follow is weighed with it: one pass serves both.
                token, logit, scores, tokens, winners = next_winner(
                    row_ptr, peaks_ptr, scores, tokens, winners, bound, scale, inverse, seed,
                    position, vocab, TILES, BLOCK,
                )  # fmt: skip
                logit = tl.maximum(logit, bound)
                low, high = mass_above(
                    row_ptr, peaks_ptr, bound, logit, largest, scale, first, last, vocab, True,
                    BLOCK,
                )  # fmt: skip
                is_alone = True
                if is_shared & (last - first < num_tiles):
                    tl.store(parts_ptr + split * 2, low)
                    tl.store(parts_ptr + split * 2 + 1, high)
                    tl.debug_barrier()
                    is_alone = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == num_splits - 1
                    parts = tl.arange(0, SPLITS)
                    is_part = parts < num_splits
                    lows = tl.load(parts_ptr + parts * 2, mask=is_part, other=0, volatile=True)
                    highs = tl.load(parts_ptr + parts * 2 + 1, mask=is_part, other=0, volatile=True)
                    low = tl.sum(lows, 0)
                    high = tl.sum(highs, 0)
                    first = first * 0
                    last = first + num_tiles
                    is_mine = is_alone
                if is_alone & (low.to(tl.float64) >= limit):
                    is_dropped = high.to(tl.float64) >= limit
                    is_dropped |= exp2((logit - largest) * scale) < min_p
                    chosen = token
                    bound = logit
                    is_searching = is_dropped
    return chosen, is_mine


@triton.jit
def settle_kernel(
    # inputs: logits [N, V], rows [N], columns [S], tiles [N, tiles]
    logits_ptr, slots_ptr, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr, top_k_ptr,
    top_p_ptr, min_p_ptr, peaks_ptr, masses_ptr, scores_ptr, tokens_ptr, winners_ptr,
    # scratch [N, splits, 2] and [N], output [N]
    parts_ptr, arrived_ptr, out_ptr,
    vocab, num_tiles, row_stride,
    HAS_NOISE: tl.constexpr, HAS_FILTERS: tl.constexpr, TILES: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Token of each row from what the tiles found."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    slot = tl.load(slots_ptr + row)
    chosen = tl.full([], -1, tl.int32)
    is_mine = split == 0
    if slot >= 0:
        tiles = tl.arange(0, TILES)
        in_row = tiles < num_tiles
        at = row * num_tiles + tiles
        peaks = tl.load(peaks_ptr + at, mask=in_row, other=NOTHING)
        largest = tl.max(peaks, 0)
        if (largest > NOTHING) & (largest < BROKEN):
            temperature = tl.load(temperature_ptr + slot) if HAS_NOISE else 0.0
            tokens = tl.load(tokens_ptr + at, mask=in_row, other=0)
            if temperature > 0:
                scores = tl.load(scores_ptr + at, mask=in_row, other=NOTHING)
                score, tile = tl.max(
                    scores, 0, return_indices=True, return_indices_tie_break_left=True
                )
                chosen = tl.max(tl.where(tiles == tile, tokens, -1), 0)
                if HAS_FILTERS:
                    top_k = tl.load(top_k_ptr + slot)
                    top_p = tl.load(top_p_ptr + slot)
                    min_p = tl.minimum(tl.load(min_p_ptr + slot), 1.0)
                    if (top_k > 0) | (top_p < 1) | (min_p > 0):
                        winners = tl.load(winners_ptr + at, mask=in_row, other=NOTHING)
                        inverse, scale = noise_scale(temperature)
                        seed = tl.load(seed_ptr + slot)
                        position = (
                            tl.load(seq_len_ptr + slot) + 1 + tl.load(offsets_ptr + row)
                        ).to(tl.uint32)
                        chosen, is_mine = best_kept(
                            logits_ptr + row * row_stride, peaks_ptr + row * num_tiles,
                            masses_ptr + row * num_tiles, parts_ptr + row * num_splits * 2,
                            arrived_ptr + row, peaks, scores, tokens, winners, largest, inverse,
                            scale, seed, position, top_k, top_p, min_p, split, num_splits,
                            num_tiles, vocab, TILES, SPLITS, BLOCK,
                        )  # fmt: skip
            else:
                peak, tile = tl.max(
                    peaks, 0, return_indices=True, return_indices_tie_break_left=True
                )
                chosen = tl.max(tl.where(tiles == tile, tokens, -1), 0)
    if is_mine:
        tl.store(out_ptr + row, chosen.to(tl.int64))
