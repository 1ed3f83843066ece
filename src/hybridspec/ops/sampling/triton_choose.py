"""Choosing tokens: the logits are read once, and once more for top_p.

`scan_kernel` finds each tile's largest logit, mass, and a bound of its scores. `pick_kernel` has
one program per row: it scores the few tokens that can be the best and asks the filters for the
winner. A filter that drops it drops all that are not more likely, so the best of those that are
comes next. Under top_p alone the winner and the one after it are weighed by all programs of
`weigh_kernel` together; the last of a row to arrive decides, and goes on alone in the rare case
that both are dropped.
"""

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
    tile_ratios,
    tile_winner,
)

__all__ = ["pick_kernel", "scan_kernel", "weigh_kernel"]

BROKEN: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def scan_kernel(
    # inputs: logits [N, V], rows [N], columns [S]
    logits_ptr, slots_ptr, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr, top_p_ptr,
    # outputs [N, tiles]
    peaks_ptr, masses_ptr, ratios_ptr, tokens_ptr,
    vocab, num_tiles, tiles_per_program, row_stride,
    HAS_NOISE: tl.constexpr, HAS_FILTERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest logit of each tile; its token, or its mass and a bound of its scores."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * tiles_per_program
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        temperature = tl.load(temperature_ptr + slot) if HAS_NOISE else 0.0
        row_ptr = logits_ptr + row * row_stride
        for tile in range(first, tl.minimum(first + tiles_per_program, num_tiles)):
            out = row * num_tiles + tile
            index, x = load_tile(row_ptr, tile, vocab, BLOCK)
            if temperature > 0:
                peak = tl.max(x, 0)
                ratio = 0.0
                mass = tl.full([], 0, tl.int64)
                if (peak > NOTHING) & (peak < BROKEN):
                    inverse, scale = noise_scale(temperature)
                    powers = tile_powers(x, peak, scale)
                    seed = tl.load(seed_ptr + slot)
                    position = tl.load(seq_len_ptr + slot) + 1 + tl.load(offsets_ptr + row)
                    ratios = tile_ratios(
                        x, powers, NOTHING, tile, seed, position.to(tl.uint32), BLOCK
                    )
                    ratio = tl.max(ratios, 0)
                    top_p = tl.load(top_p_ptr + slot) if HAS_FILTERS else 1.0
                    if top_p < 1:
                        mass = tl.sum((powers * 1073741824.0).to(tl.int32).to(tl.int64), 0)
                tl.store(ratios_ptr + out, ratio)
                if HAS_FILTERS:
                    tl.store(masses_ptr + out, mass)
            else:
                peak, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
                tl.store(tokens_ptr + out, tile * BLOCK + place)
            tl.store(peaks_ptr + out, peak)


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
    """Best token with a logit above `bound`.

    Of each tile `scores` holds its best score, with token and logit, or one that none exceeds, with
    a logit that is not above `bound`. The tile of the best is searched until it is known.
    """
    tiles = tl.arange(0, TILES)
    best, tile = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
    logit = tl.max(tl.where(tiles == tile, winners, NOTHING), 0)
    while (logit <= bound) & (best > NOTHING):
        score, token, logit = tile_winner(
            row_ptr, tile, tl.load(peaks_ptr + tile), bound, inverse, scale, seed, position, vocab,
            BLOCK,
        )  # fmt: skip
        scores = tl.where(tiles == tile, score, scores)
        tokens = tl.where(tiles == tile, token, tokens)
        winners = tl.where(tiles == tile, logit, winners)
        best, tile = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        logit = tl.max(tl.where(tiles == tile, winners, NOTHING), 0)
    return tl.max(tl.where(tiles == tile, tokens, -1), 0), logit, scores, tokens, winners


@triton.jit
def best_kept(
    row_ptr, peaks_ptr, scores, tokens, winners, bound, least, limit, min_p, largest, inverse,
    scale, seed, position, num_tiles, vocab, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best token with a logit above `bound` that the filters keep."""
    chosen = tl.full([], -1, tl.int32)
    found = bound
    is_searching = True
    while is_searching:
        chosen, found, scores, tokens, winners = next_winner(
            row_ptr, peaks_ptr, scores, tokens, winners, found, scale, inverse, seed, position,
            vocab, TILES, BLOCK,
        )  # fmt: skip
        is_searching = (found < least) | (exp2((found - largest) * scale) < min_p)
        if (is_searching == 0) & (limit < BROKEN):
            mass, same = mass_above(
                row_ptr, peaks_ptr, found, found, largest, scale, 0, num_tiles, vocab, True, BLOCK
            )
            is_searching = mass.to(tl.float64) >= limit
    return chosen, found, scores, tokens, winners


@triton.jit
def mass_limit(masses_ptr, peaks, largest, scale, top_p, num_tiles, TILES: tl.constexpr):
    """Mass that top_p allows above a token, of all tokens."""
    tiles = tl.arange(0, TILES)
    masses = tl.load(masses_ptr + tiles, mask=tiles < num_tiles, other=0)
    weights = exp2((peaks - largest) * scale).to(tl.float64)
    total = tl.sum((masses.to(tl.float64) * weights).to(tl.int64), 0)
    return tl.maximum(top_p.to(tl.float64) * total.to(tl.float64), 1.0)


@triton.jit
def load_row(
    row, slot, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr, peaks_ptr, ratios_ptr,
    num_tiles, TILES: tl.constexpr,
):  # fmt: skip
    """What the tiles of a row and its columns say."""
    tiles = tl.arange(0, TILES)
    in_row = tiles < num_tiles
    peaks = tl.load(peaks_ptr + row * num_tiles + tiles, mask=in_row, other=NOTHING)
    ratios = tl.load(ratios_ptr + row * num_tiles + tiles, mask=in_row, other=0.0)
    inverse, scale = noise_scale(tl.load(temperature_ptr + slot))
    position = tl.load(seq_len_ptr + slot) + 1 + tl.load(offsets_ptr + row)
    scores = score_bounds(ratios, peaks, inverse)
    tokens = tl.full([TILES], 0, tl.int32)
    winners = tl.full([TILES], NOTHING, tl.float32)
    seed = tl.load(seed_ptr + slot)
    return peaks, scores, tokens, winners, inverse, scale, seed, position.to(tl.uint32)


@triton.jit
def pick_kernel(
    # inputs: logits [N, V], rows [N], columns [S], tiles [N, tiles]
    logits_ptr, slots_ptr, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr, top_k_ptr,
    top_p_ptr, min_p_ptr, peaks_ptr, masses_ptr, ratios_ptr, tokens_ptr,
    # outputs: [N], and for `weigh_kernel` [N, 2], [N, 2], [N], [N]
    out_ptr, pair_ptr, pivots_ptr, limits_ptr, arrived_ptr,
    vocab, num_tiles, row_stride,
    HAS_NOISE: tl.constexpr, HAS_FILTERS: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Token of each row, but for rows with top_p alone: there it and the one after it."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    chosen = tl.full([], -1, tl.int32)
    pair_limit = tl.full([], BROKEN, tl.float64)
    if slot >= 0:
        tiles = tl.arange(0, TILES)
        at = row * num_tiles + tiles
        row_peaks = tl.load(peaks_ptr + at, mask=tiles < num_tiles, other=NOTHING)
        largest = tl.max(row_peaks, 0)
        if (largest > NOTHING) & (largest < BROKEN):
            temperature = tl.load(temperature_ptr + slot) if HAS_NOISE else 0.0
            if temperature > 0:
                row_ptr = logits_ptr + row * row_stride
                tiles_ptr = peaks_ptr + row * num_tiles
                peaks, scores, tokens, winners, inverse, scale, seed, position = load_row(
                    row, slot, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr, peaks_ptr,
                    ratios_ptr, num_tiles, TILES,
                )  # fmt: skip
                bound = tl.full([], NOTHING, tl.float32)
                least = tl.full([], NOTHING, tl.float32)
                limit = tl.full([], BROKEN, tl.float64)
                min_p = 0.0
                top_p = tl.full([], 1.0, tl.float32)
                is_pair = False
                if HAS_FILTERS:
                    top_k = tl.load(top_k_ptr + slot)
                    top_p = tl.load(top_p_ptr + slot)
                    min_p = tl.minimum(tl.load(min_p_ptr + slot), 1.0)
                    is_pair = (top_p < 1) & ((top_k <= 0) | (top_k >= vocab))
                    if (top_k > 0) & (top_k < vocab):
                        least = least_of_top(
                            row_ptr, tiles_ptr, peaks, largest, top_k, num_tiles, vocab, BLOCK
                        )
                        if top_p < 1:
                            total, same = mass_above(
                                row_ptr, tiles_ptr, least, least, largest, scale, 0, num_tiles,
                                vocab, False, BLOCK,
                            )  # fmt: skip
                            limit = tl.maximum(top_p.to(tl.float64) * total.to(tl.float64), 1.0)
                chosen, bound, scores, tokens, winners = best_kept(
                    row_ptr, tiles_ptr, scores, tokens, winners, bound, least, limit, min_p,
                    largest, inverse, scale, seed, position, num_tiles, vocab, TILES, BLOCK,
                )  # fmt: skip
                if is_pair:
                    pair_limit = mass_limit(
                        masses_ptr + row * num_tiles, peaks, largest, scale, top_p, num_tiles,
                        TILES,
                    )  # fmt: skip
                    second, pivot, scores, tokens, winners = next_winner(
                        row_ptr, tiles_ptr, scores, tokens, winners, bound, scale, inverse,
                        seed, position, vocab, TILES, BLOCK,
                    )  # fmt: skip
                    tl.store(pair_ptr + row, second)
                    tl.store(pivots_ptr + row * 2, bound)
                    tl.store(pivots_ptr + row * 2 + 1, tl.maximum(bound, pivot))
            else:
                row_tokens = tl.load(tokens_ptr + at, mask=tiles < num_tiles, other=0)
                peak, tile = tl.max(
                    row_peaks, 0, return_indices=True, return_indices_tie_break_left=True
                )
                chosen = tl.max(tl.where(tiles == tile, row_tokens, -1), 0)
    tl.store(out_ptr + row, chosen.to(tl.int64))
    if HAS_FILTERS:
        tl.store(limits_ptr + row, pair_limit)
        tl.store(arrived_ptr + row, 0)


@triton.jit
def weigh_kernel(
    # inputs: logits [N, V], rows [N], columns [S], tiles [N, tiles], of `pick_kernel`
    logits_ptr, slots_ptr, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr, min_p_ptr,
    peaks_ptr, ratios_ptr, pair_ptr, pivots_ptr, limits_ptr,
    # scratch [N, splits, 2] and [N], output [N]
    parts_ptr, arrived_ptr, out_ptr,
    vocab, num_tiles, tiles_per_program, row_stride,
    TILES: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether top_p keeps the token of a row, or the one after it, or which one."""
    row = tl.program_id(0).to(tl.int64)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    limit = tl.load(limits_ptr + row)
    if limit < BROKEN:
        slot = tl.load(slots_ptr + row)
        row_ptr = logits_ptr + row * row_stride
        tiles_ptr = peaks_ptr + row * num_tiles
        peaks, scores, tokens, winners, inverse, scale, seed, position = load_row(
            row, slot, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr, peaks_ptr, ratios_ptr,
            num_tiles, TILES,
        )  # fmt: skip
        largest = tl.max(peaks, 0)
        first_pivot = tl.load(pivots_ptr + row * 2)
        second_pivot = tl.load(pivots_ptr + row * 2 + 1)
        first = split * tiles_per_program
        low, high = mass_above(
            row_ptr, tiles_ptr, first_pivot, second_pivot, largest, scale, first,
            tl.minimum(first + tiles_per_program, num_tiles), vocab, True, BLOCK,
        )  # fmt: skip
        part_ptr = parts_ptr + row * num_splits * 2
        tl.store(part_ptr + split * 2, low)
        tl.store(part_ptr + split * 2 + 1, high)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == num_splits - 1:
            parts = tl.arange(0, SPLITS)
            is_part = parts < num_splits
            lows = tl.load(part_ptr + parts * 2, mask=is_part, other=0, volatile=True)
            highs = tl.load(part_ptr + parts * 2 + 1, mask=is_part, other=0, volatile=True)
            if tl.sum(lows, 0).to(tl.float64) >= limit:
                min_p = tl.minimum(tl.load(min_p_ptr + slot), 1.0)
                chosen = tl.load(pair_ptr + row)
                is_dropped = exp2((second_pivot - largest) * scale) < min_p
                if is_dropped | (tl.sum(highs, 0).to(tl.float64) >= limit):
                    chosen, pivot, scores, tokens, winners = best_kept(
                        row_ptr, tiles_ptr, scores, tokens, winners, second_pivot, NOTHING, limit,
                        min_p, largest, inverse, scale, seed, position, num_tiles, vocab, TILES,
                        BLOCK,
                    )  # fmt: skip
                tl.store(out_ptr + row, chosen.to(tl.int64))
