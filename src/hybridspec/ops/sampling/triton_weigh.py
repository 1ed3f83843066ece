"""Filters that tiles' sums cannot decide: what lies above a token is read.

`weigh_kernel` has a program for some tiles of a row. Under top_p it adds up the masses above three
winners, until enough lies below the first one that it surely stays. Under top_k it lists the tokens
that can be among the k likeliest. `settle_kernel`, one program per row, decides from that. The rare
row whose sums lie within their error of a border, that drops all three, or whose list is too long,
it settles alone, in the exact arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hybridspec.ops.sampling.triton_choose import FACTS, LIST, PIVOTS, UNITS, WEIGH
from hybridspec.ops.sampling.triton_rows import (
    BROKEN,
    kth_largest,
    load_columns,
    load_row,
    mass_above,
    next_winner,
    to_key,
    to_logit,
    verdict,
)
from hybridspec.ops.sampling.triton_tiles import (
    NOTHING,
    exact_scores,
    exp2,
    load_tile,
    token_words,
)

__all__ = ["settle_kernel", "weigh_kernel"]


@triton.jit
def least_of_top(row_ptr, peaks_ptr, low, largest, top_k, num_tiles, vocab, BLOCK: tl.constexpr):
    """A logit that exactly the top_k largest reach, and those that equal the last of them."""
    low = to_key(low).to(tl.int64)
    high = to_key(largest).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        pivot = to_logit(middle.to(tl.int32))
        count = tl.full([], 0, tl.int32)
        for tile in range(0, num_tiles):
            if tl.load(peaks_ptr + tile) >= pivot:
                index, x = load_tile(row_ptr, tile, vocab, BLOCK)
                count += tl.sum((x >= pivot).to(tl.int32), 0)
        low = tl.where(count >= top_k, middle, low)
        high = tl.where(count == top_k, middle + 1, tl.where(count > top_k, high, middle))
    return to_logit(low.to(tl.int32))


@triton.jit
def weigh_alone(
    row_ptr, peaks_ptr, masses_ptr, pivot, below, largest, scale, total, top_p, num_tiles, vocab,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Verdict on one token; nothing more is read than it takes.

    `below` is the mass of the tiles that have nothing above it.
    """
    above = tl.full([], 0.0, tl.float64)
    answer = tl.full([], -1, tl.int32)
    first = 0
    while (first < num_tiles) & (answer < 0):
        tiles = first + tl.arange(0, GROUP)
        in_row = tiles < num_tiles
        peaks = tl.load(peaks_ptr + tiles, mask=in_row, other=NOTHING)
        is_read = peaks > pivot
        if tl.max(is_read.to(tl.int32), 0) > 0:
            masses = tl.load(masses_ptr + tiles, mask=in_row, other=0.0)
            index = tiles[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            is_token = is_read[:, None] & (index < vocab)
            x = tl.load(row_ptr + index, mask=is_token, other=NOTHING)
            known = tl.where(is_read, peaks, 0.0)
            roots = tl.exp2((x - known[:, None]) * (0.5 * scale))
            sums = tl.sum(tl.where(x > pivot, roots * roots, 0.0), 1)
            weights = tl.where(is_read, exp2((known - largest) * scale), 0.0).to(tl.float64)
            above += tl.sum(sums * weights, 0)
            below += tl.sum((masses - sums) * weights, 0)
        first += GROUP
        answer = verdict(above, below, total, top_p)
    return answer


@triton.jit
def settle_alone(
    row_ptr, peaks_ptr, masses_ptr, ratios_ptr, bound, low, top_k, top_p, min_p, inverse, scale,
    seed, position, num_tiles, vocab,
    TILES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best token with a logit above `bound` that filters keep; `low`: what top_k tokens reach."""
    peaks, known = load_row(peaks_ptr, ratios_ptr, inverse, num_tiles, TILES)
    largest = tl.max(peaks, 0)
    tiles = tl.arange(0, TILES)
    masses = tl.load(masses_ptr + tiles, mask=tiles < num_tiles, other=0.0)
    masses = masses * exp2((peaks - largest) * scale).to(tl.float64)
    least = tl.full([], NOTHING, tl.float32)
    has_top_k = (top_k > 0) & (top_k < vocab)
    if has_top_k:
        least = least_of_top(row_ptr, peaks_ptr, low, largest, top_k, num_tiles, vocab, BLOCK)
    limit = tl.full([], -1.0, tl.float64)
    token = tl.full([], -1, tl.int32)
    logit = bound
    score = tl.full([], BROKEN, tl.float64)
    answer = tl.full([], 0, tl.int32)
    while answer == 0:
        score, token, logit, known = next_winner(
            row_ptr, peaks_ptr, known, logit, score, token, False, inverse, scale, seed, position,
            vocab, TILES, BLOCK,
        )  # fmt: skip
        is_out = (logit < least) | (exp2((logit - largest) * scale) < min_p)
        answer = tl.where(is_out, 0, 1)
        if (top_p < 1) & (is_out == 0):
            answer = tl.full([], -1, tl.int32)
            if has_top_k == 0:
                below = tl.sum(tl.where(peaks > logit, 0.0, masses), 0)
                answer = weigh_alone(
                    row_ptr, peaks_ptr, masses_ptr, logit, below, largest, scale,
                    tl.sum(masses, 0), top_p, num_tiles, vocab, GROUP, BLOCK,
                )  # fmt: skip
            if answer < 0:
                if limit < 0:
                    exact = mass_above(
                        row_ptr, peaks_ptr, least, largest, scale, num_tiles, vocab, False, BLOCK
                    )
                    limit = tl.maximum(top_p.to(tl.float64) * exact.to(tl.float64), 1.0)
                above = mass_above(
                    row_ptr, peaks_ptr, logit, largest, scale, num_tiles, vocab, True, BLOCK
                )
                answer = tl.where(above.to(tl.float64) >= limit, 0, 1)
    return token


@triton.jit
def settle_list(
    row_ptr, list_ptr, count, top_k, top_p, min_p, largest, inverse, scale, seed, position,
    LENGTH: tl.constexpr,
):  # fmt: skip
    """Token that the filters keep of the list, and a verdict: -1 if exact sums have to say."""
    places = tl.arange(0, LENGTH)
    is_listed = places < count
    tokens = tl.load(list_ptr + places, mask=is_listed, other=0)
    x = tl.load(row_ptr + tokens, mask=is_listed, other=NOTHING)
    least = kth_largest(x, largest, top_k)
    is_kept = is_listed & (x >= least)
    powers = exp2((x - largest) * scale)
    masses = tl.where(is_kept, powers, 0.0)
    total = tl.sum(masses, 0).to(tl.float64)
    is_kept = is_kept & (powers >= min_p)
    scores = exact_scores(x, token_words(tokens, seed, position), inverse)
    scores = tl.where(is_kept, scores, NOTHING)
    token = tl.full([], -1, tl.int32)
    answer = tl.full([], 0, tl.int32)
    while answer == 0:
        best = tl.max(scores, 0)
        token = tl.min(tl.where(is_kept & (scores == best), tokens, 0x7FFFFFFF), 0)
        logit = tl.max(tl.where(is_kept & (tokens == token), x, NOTHING), 0)
        above = tl.sum(tl.where(x > logit, masses, 0.0), 0).to(tl.float64)
        is_sure = (top_p >= 1) | (logit == largest)
        answer = tl.where(is_sure, 1, verdict(above, total - above, total, top_p))
        scores = tl.where(x > logit, scores, NOTHING)
    return token, answer


@triton.jit
def add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def add_weights(x, peak, mass, pivots, sums_ptr, largest, scale):
    """Add what a tile has above the row's winners and below the first; return all found below."""
    first, second, third = pivots
    roots = tl.exp2((x - peak) * (0.5 * scale))
    powers = roots * roots
    above, above_second, above_third = tl.reduce(
        (
            tl.where(x > first, powers, 0.0),
            tl.where(x > second, powers, 0.0),
            tl.where(x > third, powers, 0.0),
        ),
        0,
        add_three,
    )
    weight = exp2((peak - largest) * scale).to(tl.float64) * UNITS
    tl.atomic_add(sums_ptr, (above * weight).to(tl.int64), sem="relaxed")
    tl.atomic_add(sums_ptr + 1, (above_second * weight).to(tl.int64), sem="relaxed")
    tl.atomic_add(sums_ptr + 2, (above_third * weight).to(tl.int64), sem="relaxed")
    # Never less than nothing, so that what is enough stays enough.
    units = (tl.maximum(mass - above, 0.0) * weight).to(tl.int64)
    known = units + tl.atomic_add(sums_ptr + PIVOTS, units, sem="relaxed")
    return known.to(tl.float64) * (1.0 / UNITS)


@triton.jit
def weigh_kernel(
    # inputs: logits [N, V], tiles [N, tiles], of `pick_kernel` [N], [N, FACTS]
    logits_ptr, peaks_ptr, masses_ptr, modes_ptr, facts_ptr,
    # outputs [N, PIVOTS + 1], [N, LENGTH]
    sums_ptr, lists_ptr,
    vocab, num_tiles, row_stride,
    SHARE: tl.constexpr, BLOCK: tl.constexpr, LENGTH: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Read a share of the tiles of a row that `pick_kernel` left open, the next one ahead."""
    if IS_OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    mode = tl.load(modes_ptr + row)
    if mode > 0:
        row_ptr = logits_ptr + row * row_stride
        facts_ptr += row * FACTS
        sums_ptr += row * (PIVOTS + 1)
        total = tl.load(facts_ptr)
        largest = tl.load(facts_ptr + 1).to(tl.float32)
        scale = tl.load(facts_ptr + 2).to(tl.float32)
        top_p = tl.load(facts_ptr + 3)
        low = tl.load(facts_ptr + 4).to(tl.float32)
        pivots = (low, low, low)
        if mode == WEIGH:
            second = tl.load(facts_ptr + 5).to(tl.float32)
            pivots = (low, second, tl.load(facts_ptr + 6).to(tl.float32))
        tiles = tl.program_id(1) + tl.arange(0, SHARE) * tl.num_programs(1)
        at = row * num_tiles + tiles
        peaks = tl.load(peaks_ptr + at, mask=tiles < num_tiles, other=NOTHING)
        masses = tl.load(masses_ptr + at, mask=tiles < num_tiles, other=0.0)
        # Other programs add to this. An atomic operation gives all threads the same answer.
        known = tl.atomic_add(sums_ptr + PIVOTS, 0, sem="relaxed")
        enough = known.to(tl.float64) * (1.0 / UNITS)
        is_wanted = (peaks > low) | ((mode == LIST) & (peaks == low) & (peaks > NOTHING))
        order = tl.where(is_wanted, tiles, num_tiles)
        # Where enough lies below the first winner it stays.
        is_open = (mode == LIST) | (verdict(0.0, enough, total, top_p) != 1)
        tile = tl.where(is_open, tl.min(order, 0), num_tiles)
        places = tl.arange(0, BLOCK)
        index = tile * BLOCK + places
        x = tl.load(row_ptr + index, mask=index < vocab, other=NOTHING)
        while tile < num_tiles:
            following = tl.min(tl.where(order > tile, order, num_tiles), 0)
            ahead = following * BLOCK + places
            next_x = tl.load(row_ptr + ahead, mask=ahead < vocab, other=NOTHING)
            if mode == LIST:
                index = tile * BLOCK + places
                is_listed = (x >= low) & (x > NOTHING)
                place = tl.atomic_add(sums_ptr + places * 0, 1, mask=is_listed, sem="relaxed")
                list_ptr = lists_ptr + row * LENGTH + place
                tl.store(list_ptr, index, mask=is_listed & (place < LENGTH))
            else:
                is_here = tiles == tile
                peak = tl.max(tl.where(is_here, peaks, NOTHING), 0)
                mass = tl.max(tl.where(is_here, masses, 0.0), 0)
                enough = add_weights(x, peak, mass, pivots, sums_ptr, largest, scale)
                is_open = verdict(0.0, enough, total, top_p) != 1
            tile = tl.where(is_open, following, num_tiles)
            x = next_x


@triton.jit
def settle_weighed(facts_ptr, candidates_ptr, sums_ptr, top_p, min_p, largest, scale):
    """The first of the weighed tokens that stays, what is dropped, and a verdict."""
    total = tl.load(facts_ptr)
    enough = tl.load(sums_ptr + PIVOTS).to(tl.float64) * (1.0 / UNITS)
    token = tl.full([], -1, tl.int32)
    bound = tl.full([], NOTHING, tl.float32)
    answer = tl.full([], 0, tl.int32)
    for j in tl.static_range(PIVOTS):
        if answer == 0:
            logit = tl.load(facts_ptr + 4 + j).to(tl.float32)
            token = tl.load(candidates_ptr + j)
            above = tl.load(sums_ptr + j).to(tl.float64) * (1.0 / UNITS)
            # With a dropped token go all that are not more likely; only above those was weighed.
            is_out = (logit <= bound) | (exp2((logit - largest) * scale) < min_p)
            below = enough if j == 0 else total - above
            answer = tl.where(is_out, 0, verdict(above, below, total, top_p))
            bound = tl.where(answer == 0, tl.maximum(bound, logit), bound)
    return token, bound, answer


@triton.jit
def settle_kernel(
    # inputs: logits [N, V], rows [N], columns [S], tiles [N, tiles], of the kernels before
    logits_ptr, slots_ptr, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr, top_k_ptr,
    top_p_ptr, min_p_ptr, peaks_ptr, masses_ptr, ratios_ptr, modes_ptr, facts_ptr,
    candidates_ptr, sums_ptr, lists_ptr,
    # output [N]
    out_ptr,
    vocab, num_tiles, row_stride,
    TILES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, LENGTH: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Token of each row that `pick_kernel` left open; the table is read while others weigh."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0)
    if temperature > 0:
        inverse, scale, seed, position = load_columns(
            row, slot, offsets_ptr, seq_len_ptr, temperature_ptr, seed_ptr
        )
        top_k = tl.load(top_k_ptr + slot)
        top_p = tl.load(top_p_ptr + slot)
        min_p = tl.minimum(tl.load(min_p_ptr + slot), 1.0)
        if IS_OVERLAPPED:
            gdc_wait()
        mode = tl.load(modes_ptr + row)
        if mode > 0:
            row_ptr = logits_ptr + row * row_stride
            peaks_ptr += row * num_tiles
            facts_ptr += row * FACTS
            sums_ptr += row * (PIVOTS + 1)
            largest = tl.load(facts_ptr + 1).to(tl.float32)
            token = tl.full([], -1, tl.int32)
            answer = tl.full([], -1, tl.int32)
            bound = tl.full([], NOTHING, tl.float32)
            low = tl.load(facts_ptr + 4).to(tl.float32)
            if mode == LIST:
                count = tl.load(sums_ptr)
                if count <= LENGTH:
                    token, answer = settle_list(
                        row_ptr, lists_ptr + row * LENGTH, count, top_k, top_p, min_p, largest,
                        inverse, scale, seed, position, LENGTH,
                    )  # fmt: skip
            else:
                token, bound, answer = settle_weighed(
                    facts_ptr, candidates_ptr + row * PIVOTS, sums_ptr, top_p, min_p, largest,
                    scale,
                )  # fmt: skip
            if answer != 1:
                token = settle_alone(
                    row_ptr, peaks_ptr, masses_ptr + row * num_tiles, ratios_ptr + row * num_tiles,
                    bound, low, top_k, top_p, min_p, inverse, scale, seed, position, num_tiles,
                    vocab, TILES, GROUP, BLOCK,
                )  # fmt: skip
            tl.store(out_ptr + row, token.to(tl.int64))
    else:
        if IS_OVERLAPPED:
            gdc_wait()
