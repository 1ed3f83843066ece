"""Choosing tokens: the logits are read once, and some of them again where a filter asks for it.

`scan_kernel` finds each tile's largest logit, mass, and a bound of its scores. `pick_kernel` has
one program per row: it scores the few tokens that can be the best and asks the filters for the
winner. A filter that drops it drops all that are not more likely, so the best of those that are
comes next. What the tiles' sums cannot decide is left to `weigh_kernel` (triton_weigh.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hybridspec.ops.sampling.triton_rows import (
    BROKEN,
    kth_largest,
    load_columns,
    load_row,
    next_winner,
    verdict,
)
from hybridspec.ops.sampling.triton_tiles import (
    NOTHING,
    exp2,
    load_tile,
    tile_ratios,
    tile_roots,
)

__all__ = ["CHUNKS", "FACTS", "LIST", "PIVOTS", "UNITS", "WEIGH", "pick_kernel", "scan_kernel"]

CHUNKS: tl.constexpr = tl.constexpr(8)  # of a tile, whose largest logits bound a top_k
PIVOTS: tl.constexpr = tl.constexpr(3)  # winners that are weighed at once
FACTS: tl.constexpr = tl.constexpr(4 + 3)  # of an open row: see `pick_kernel`
UNITS: tl.constexpr = tl.constexpr(2.0**30)  # of a mass that is added up as an integer
# What is left to do for a row.
WEIGH: tl.constexpr = tl.constexpr(1)
LIST: tl.constexpr = tl.constexpr(2)


@triton.jit
def scan_tiles(
    row_ptr, outs, first, last, least, noise, vocab,
    HAS_TOP_K: tl.constexpr, HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest logit, mass and a bound of the scores of tiles of a row with a temperature.

    What only some options need is compiled in or not: to ask in each tile costs a row without them
    a twentieth.
    """
    peaks_ptr, masses_ptr, ratios_ptr, chunks_ptr = outs
    scale, seed, position = noise
    for tile in range(first, last):
        index = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + index, mask=index < vocab, other=NOTHING)
        if HAS_TOP_K:
            chunks = tl.max(tl.reshape(x, [CHUNKS, BLOCK // CHUNKS]), 1)
            tl.store(chunks_ptr + tile * CHUNKS + tl.arange(0, CHUNKS), chunks)
        peak = tl.max(x, 0)
        mass, ratio = 0.0, 0.0
        if peak < BROKEN:
            roots = tile_roots(x, peak, scale)
            mass = tl.sum(roots * roots, 0)
            ratios = tile_ratios(roots, tile, seed, position, BLOCK)
            if HAS_MIN_P:
                ratios = tl.where(roots >= least, ratios, 0.0)
            ratio = tl.max(ratios, 0)
        # A maximum does not show a NaN, but the sum does.
        is_whole = (peak < BROKEN) & (mass < BROKEN)
        tl.store(peaks_ptr + tile, tl.where(is_whole, peak, BROKEN))
        tl.store(masses_ptr + tile, mass)
        tl.store(ratios_ptr + tile, ratio)


@triton.jit
def scan_kernel(
    # inputs: logits [N, V], rows [N], columns [S]
    logits_ptr, slots_ptr, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr, top_k_ptr,
    min_p_ptr,
    # outputs [N, tiles], the last one [N, tiles, CHUNKS]
    peaks_ptr, masses_ptr, ratios_ptr, tokens_ptr, chunks_ptr,
    vocab, num_tiles, tiles_per_program, row_stride,
    HAS_NOISE: tl.constexpr, HAS_FILTERS: tl.constexpr, BLOCK: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Largest logit of each tile; its token, or its mass and a bound of its scores."""
    if IS_OVERLAPPED:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * tiles_per_program
    last = tl.minimum(first + tiles_per_program, num_tiles)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        temperature = tl.load(temperature_ptr + slot) if HAS_NOISE else 0.0
        row_ptr = logits_ptr + row * row_stride
        if temperature > 0:
            inverse, scale, seed, position = load_columns(
                row, slot, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr
            )
            top_k = tl.load(top_k_ptr + slot) if HAS_FILTERS else 0
            # No token of a tile is likelier than the row's likeliest, so min_p drops these.
            least = 0.0
            if HAS_FILTERS:
                least = 0.9999 * tl.sqrt(tl.minimum(tl.load(min_p_ptr + slot), 1.0))
            at = row * num_tiles
            outs = (peaks_ptr + at, masses_ptr + at, ratios_ptr + at, chunks_ptr + at * CHUNKS)
            noise = (scale, seed, position)
            if top_k > 0:
                scan_tiles(row_ptr, outs, first, last, least, noise, vocab, True, False, BLOCK)
            elif least > 0:
                scan_tiles(row_ptr, outs, first, last, least, noise, vocab, False, True, BLOCK)
            else:
                scan_tiles(row_ptr, outs, first, last, least, noise, vocab, False, False, BLOCK)
        else:
            for tile in range(first, last):
                index, x = load_tile(row_ptr, tile, vocab, BLOCK)
                peak, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
                out = row * num_tiles + tile
                tl.store(peaks_ptr + out, peak)
                tl.store(tokens_ptr + out, tile * BLOCK + place)


@triton.jit
def surely_dropped(largest, min_p, scale):
    """A logit that min_p drops with all that are not above it, whatever rounding does."""
    away = (0.001 - tl.log2(tl.maximum(min_p, 1e-30))) / scale + tl.abs(largest) * 1e-6
    return tl.where(min_p > 0, largest - away, NOTHING)


@triton.jit
def store_facts(facts_ptr, total, largest, scale, top_p):
    """What is known of an open row, but for the logits of its winners."""
    tl.store(facts_ptr, total)
    tl.store(facts_ptr + 1, largest.to(tl.float64))
    tl.store(facts_ptr + 2, scale.to(tl.float64))
    tl.store(facts_ptr + 3, top_p)


@triton.jit
def pick_kernel(
    # inputs: logits [N, V], rows [N], columns [S], tiles [N, tiles]
    logits_ptr, slots_ptr, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr, top_k_ptr,
    top_p_ptr, min_p_ptr, peaks_ptr, masses_ptr, ratios_ptr, tokens_ptr, chunks_ptr,
    # outputs [N], and of open rows [N], [N, FACTS], [N, PIVOTS], [N, PIVOTS + 1]
    out_ptr, modes_ptr, facts_ptr, candidates_ptr, sums_ptr,
    vocab, num_tiles, row_stride,
    HAS_NOISE: tl.constexpr, HAS_FILTERS: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Token of each row; of open ones mass, largest logit, c, top_p, and logits of winners.

    The table is read while the scan still runs.
    """
    if IS_OVERLAPPED:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    chosen = tl.full([], -1, tl.int32)
    mode = tl.full([], 0, tl.int32)
    tiles = tl.arange(0, TILES)
    at = row * num_tiles + tiles
    temperature = 0.0
    if HAS_NOISE:
        temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0)
    if temperature > 0:
        inverse, scale, seed, position = load_columns(
            row, slot, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr
        )
        top_k = tl.load(top_k_ptr + slot) if HAS_FILTERS else 0
        top_p = tl.load(top_p_ptr + slot) if HAS_FILTERS else 1.0
        min_p = tl.minimum(tl.load(min_p_ptr + slot), 1.0) if HAS_FILTERS else 0.0
        if IS_OVERLAPPED:
            gdc_wait()
        row_ptr = logits_ptr + row * row_stride
        tiles_ptr = peaks_ptr + row * num_tiles
        facts_ptr += row * FACTS
        sums_ptr += row * (PIVOTS + 1)
        row_peaks = tl.load(peaks_ptr + at, mask=tiles < num_tiles, other=NOTHING)
        largest = tl.max(row_peaks, 0)
        if (largest > NOTHING) & (largest < BROKEN):
            if (top_k > 0) & (top_k < vocab):
                mode += LIST
                # So many chunks reach this logit, so that as many tokens do.
                places = tl.arange(0, TILES * CHUNKS)
                chunks = tl.load(
                    chunks_ptr + row * num_tiles * CHUNKS + places,
                    mask=places < num_tiles * CHUNKS, other=NOTHING,
                )  # fmt: skip
                bound = kth_largest(chunks, largest, top_k)
                store_facts(facts_ptr, tl.full([], 0.0, tl.float64), largest, scale, 1.0)
                tl.store(facts_ptr + 4, bound.to(tl.float64))
                tl.store(sums_ptr, 0)
                tl.store(sums_ptr + PIVOTS, 0)
            else:
                peaks, known = load_row(
                    tiles_ptr, ratios_ptr + row * num_tiles, inverse, num_tiles, TILES
                )
                weights = exp2((peaks - largest) * scale).to(tl.float64)
                masses = weights
                if HAS_FILTERS:
                    masses *= tl.load(masses_ptr + at, mask=tiles < num_tiles, other=0.0)
                total = tl.sum(masses, 0)
                bound = surely_dropped(largest, min_p, scale)
                token = chosen
                score = tl.full([], BROKEN, tl.float64)
                count = 0
                is_searching = True
                while is_searching:
                    score, token, logit, known = next_winner(
                        row_ptr, tiles_ptr, known, bound, score, token, top_p < 1, inverse, scale,
                        seed, position, vocab, TILES, BLOCK,
                    )  # fmt: skip
                    answer = tl.full([], 1, tl.int32)
                    if HAS_FILTERS:
                        is_higher = peaks > logit
                        below = tl.sum(tl.where(is_higher, 0.0, masses), 0)
                        if (top_p < 1) & (tl.max(is_higher.to(tl.int32), 0) > 0):
                            above = tl.sum(tl.where(is_higher, weights, 0.0), 0)
                            answer = verdict(above, below, total, top_p)
                        if exp2((logit - largest) * scale) < min_p:
                            answer = tl.full([], 0, tl.int32)
                        # Those that come after an open one are weighed with it.
                        if (count > 0) | (answer < 0):
                            if count == 0:
                                mode += WEIGH
                                store_facts(facts_ptr, total, largest, scale, top_p)
                                tl.store(sums_ptr + PIVOTS, (below * UNITS).to(tl.int64))
                            tl.store(facts_ptr + 4 + count, logit.to(tl.float64))
                            tl.store(candidates_ptr + row * PIVOTS + count, token)
                            tl.store(sums_ptr + count, 0)
                            count += 1
                    chosen = tl.where(count > 1, chosen, token)
                    bound = tl.where((answer == 0) & (count == 0), logit, bound)
                    is_open = (count > 0) & (count < PIVOTS)
                    is_searching = is_open | ((answer == 0) & (count == 0))
    else:
        if IS_OVERLAPPED:
            gdc_wait()
        if slot >= 0:
            row_peaks = tl.load(peaks_ptr + at, mask=tiles < num_tiles, other=NOTHING)
            row_tokens = tl.load(tokens_ptr + at, mask=tiles < num_tiles, other=0)
            largest, tile = tl.max(
                row_peaks, 0, return_indices=True, return_indices_tie_break_left=True
            )
            if (largest > NOTHING) & (largest < BROKEN):
                chosen = tl.max(tl.where(tiles == tile, row_tokens, -1), 0)
    tl.store(out_ptr + row, chosen.to(tl.int64))
    if HAS_FILTERS:
        tl.store(modes_ptr + row, mode)
