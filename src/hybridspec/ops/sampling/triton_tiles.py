"""Shared by the kernels that choose tokens: tiles of a row, masses and scores.

A tile is 2048 tokens, or the whole row where it is shorter. What decides is the arithmetic of
mass.py and gumbel.py, each operation rounded once. What merely rules tokens out is quicker: the
device's own exp2 and square root, wrong by less than 1e-5, of halved exponents, whose squares are
the masses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.sampling import mass

__all__ = [
    "exact_scores",
    "exp2",
    "load_tile",
    "noise_scale",
    "score_bounds",
    "tile_powers",
    "tile_ratios",
    "tile_roots",
    "tile_winners",
    "token_words",
]

C4: tl.constexpr = tl.constexpr(mass.COEFFICIENTS[0])
C3: tl.constexpr = tl.constexpr(mass.COEFFICIENTS[1])
C2: tl.constexpr = tl.constexpr(mass.COEFFICIENTS[2])
C1: tl.constexpr = tl.constexpr(mass.COEFFICIENTS[3])
C0: tl.constexpr = tl.constexpr(mass.COEFFICIENTS[4])
LEAST: tl.constexpr = tl.constexpr(mass.LEAST_EXPONENT)
ROUNDER: tl.constexpr = tl.constexpr(mass.ROUNDER)
LOG2_E: tl.constexpr = tl.constexpr(mass.LOG2_E)
NOTHING: tl.constexpr = tl.constexpr(float("-inf"))
NO_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # behind all tokens


@triton.jit
def exp2(y):
    """The polynomial of mass.py."""
    y = tl.maximum(y, LEAST)
    shifted = y + ROUNDER
    fraction = y - (shifted - ROUNDER)
    power = fraction * C4 + C3
    power = power * fraction + C2
    power = power * fraction + C1
    power = power * fraction + C0
    bits = power.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def noise_scale(temperature):
    """1 / temperature in fp64, and the factor c of the masses in fp32."""
    wide = temperature.to(tl.float64)
    scale = tl.minimum(LOG2_E / wide, 1.2676506002282294e30)
    return 1.0 / wide, scale.to(tl.float32)


@triton.jit
def load_tile(row_ptr, tile, vocab, BLOCK: tl.constexpr):
    """Ids and logits of a tile; NaN comes as +inf, so that a maximum shows it."""
    index = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + index, mask=index < vocab, other=NOTHING)
    return index, tl.where(x == x, x, float("inf"))


@triton.jit
def tile_powers(x, peak, scale):
    """Probabilities as shares of the likeliest token's of the tile."""
    known = tl.where(peak == NOTHING, 0.0, peak)
    return exp2((x - known) * scale)


@triton.jit
def tile_roots(x, peak, scale):
    """Square roots of `tile_powers`, nearly."""
    known = tl.where(peak == NOTHING, 0.0, peak)
    return tl.exp2((x - known) * (0.5 * scale))


@triton.jit
def exact_scores(x, word, inverse):
    """fp64(logit) / temperature + noise of tokens."""
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    noise = (0.0 - tl.log(0.0 - tl.log(uniform))).to(tl.float32)
    return x.to(tl.float64) * inverse + noise.to(tl.float64)


@triton.jit
def tile_words(tile, seed, position, BLOCK: tl.constexpr):
    """Random words of the tile's tokens, [BLOCK] uint32: four of each counter."""
    group = (tile * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed, group, zero + position, zero, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])


@triton.jit
def token_words(token, seed, position):
    """Random words of single tokens."""
    group = (token // 4).to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed, group, zero + position, zero, zero)
    place = token % 4
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@triton.jit
def tile_ratios(roots, tile, seed, position, BLOCK: tl.constexpr):
    """Bounds of scores but for the tile's part: roots of p / (r + r^2 / 2), in units of 2^-16.

    With u = (w + 1/2) / 2^32, r = 1 - u and E = -log u, a score is log(p / E), and E is at least
    r + r^2 / 2: a bound without a logarithm.
    """
    words = tile_words(tile, seed, position, BLOCK)
    rest = (0xFFFFFFFF - words).to(tl.float32) + 0.5
    return roots * tl.rsqrt(tl.fma(rest, rest * 1.1641532182693481e-10, rest))


@triton.jit
def score_bounds(ratios, peaks, inverse):
    """Scores that nothing in a tile exceeds, in fp64; a thousandth is left to fp32's rounding."""
    is_some = ratios > 0
    logs = 2.0 * tl.log(tl.where(is_some, ratios, 1.0).to(tl.float64) * (1.0005 * 65536.0))
    known = tl.where(is_some, peaks, 0.0).to(tl.float64)
    return tl.where(is_some, logs + known * inverse, NOTHING)


@triton.jit
def best_of(scores, tokens, logits):
    """Best score, the lowest of its tokens, its logit, and the scores without it."""
    best = tl.max(scores, 0)
    token = tl.min(tl.where(scores == best, tokens, NO_ID), 0)
    logit = tl.max(tl.where(tokens == token, logits, NOTHING), 0)
    return best, token, logit, tl.where(tokens == token, NOTHING, scores)


@triton.jit
def tile_winners(
    row_ptr, tile, peak, bound, last_score, last_token, wants_two, inverse, scale, seed, position,
    vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    """Best two tokens of a tile with a logit above `bound` that come after another one.

    Tokens are scored in the order of their bounds, four at a time, until none can be among the two;
    without `wants_two` until the best is known, whose score then bounds the second's. What lies so
    far below the tile's largest logit that its ratio is 0 is never scored: noise cannot make up for
    it. Returns score, id and logit of each; a logit of -inf where there is none, or none is known.
    """
    index, x = load_tile(row_ptr, tile, vocab, BLOCK)
    ratios = tile_ratios(tile_roots(x, peak, scale), tile, seed, position, BLOCK)
    # Positive floats order as integers; their last bits make way for the place.
    keys = (ratios.to(tl.int32, bitcast=True) & (0 - BLOCK)) | (index & (BLOCK - 1))
    keys = tl.where((x > bound) & (ratios > 0), keys, -1)
    lanes = tl.arange(0, 8)  # two that are the best so far, four that are new
    scores = tl.full([8], NOTHING, tl.float64)
    tokens = tl.full([8], NO_ID, tl.int32)
    logits = tl.full([8], NOTHING, tl.float32)
    best, token, logit, rest = best_of(scores, tokens, logits)
    second, second_token, second_logit = best, token, logit
    floor = tl.full([], 0.0, tl.float32)
    top = tl.max(keys, 0)
    while (top >= 0) & ((top | (BLOCK - 1)).to(tl.float32, bitcast=True) > floor):
        for j in tl.static_range(2, 6):
            place = tl.where(top < 0, NO_ID, tile * BLOCK + (top & (BLOCK - 1)))
            tokens = tl.where(lanes == j, place, tokens)
            keys = tl.where(keys == top, -1, keys)
            top = tl.max(keys, 0)
        is_new = (lanes >= 2) & (tokens != NO_ID)
        values = tl.load(row_ptr + tokens, mask=is_new, other=NOTHING)
        new = exact_scores(values, token_words(tokens, seed, position), inverse)
        is_next = (new < last_score) | ((new == last_score) & (tokens > last_token))
        scores = tl.where(is_new & is_next, new, scores)
        logits = tl.where(is_new, values, logits)
        best, token, logit, rest = best_of(scores, tokens, logits)
        second, second_token, second_logit, rest = best_of(rest, tokens, logits)
        scores = tl.where(lanes == 0, best, tl.where(lanes == 1, second, NOTHING))
        tokens = tl.where(lanes == 0, token, tl.where(lanes == 1, second_token, NO_ID))
        logits = tl.where(lanes == 0, logit, tl.where(lanes == 1, second_logit, NOTHING))
        ahead = tl.minimum(tl.where(wants_two, second, best) - peak.to(tl.float64) * inverse, 80.0)
        floor = tl.exp((0.5 * ahead).to(tl.float32)) * (0.999 / 65536.0)
    second = tl.where(wants_two, second, best)
    second_logit = tl.where(wants_two, second_logit, NOTHING)
    return best, token, logit, second, second_token, second_logit
