"""What the kernels that choose tokens share: tiles of a row, masses and scores.

A tile is 2048 tokens, or the whole row where it is shorter. The arithmetic is that of mass.py and
gumbel.py, each operation rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.sampling import mass

__all__ = [
    "exp2",
    "load_tile",
    "noise_scale",
    "score_bounds",
    "tile_powers",
    "tile_ratios",
    "tile_winner",
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
def row_score(x, word, inverse):
    """fp64(logit) / temperature + noise of one token."""
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
def token_word(token, seed, position):
    """Random word of one token."""
    group = (token // 4).to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed, group, zero + position, zero, zero)
    place = token % 4
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@triton.jit
def tile_ratios(x, powers, bound, tile, seed, position, BLOCK: tl.constexpr):
    """Bounds of scores but for the tile's part: p / (1 - u), -1 up to a logit of `bound`.

    With u = (w + 1/2) / 2^32 and E = -log u, a score is log(p / E), and E >= 1 - u: a bound without
    a logarithm. In units of 2^-32.
    """
    words = tile_words(tile, seed, position, BLOCK)
    rest = (0xFFFFFFFF - words).to(tl.float32) + 0.5
    return tl.where(x > bound, powers / rest, -1.0)


@triton.jit
def score_bounds(ratios, peaks, inverse):
    """Scores that nothing in a tile exceeds, in fp64; a thousandth is left to fp32's rounding."""
    is_some = ratios > 0
    logs = tl.log(tl.where(is_some, ratios, 1.0).to(tl.float64) * (1.001 * 4294967296.0))
    known = tl.where(is_some, peaks, 0.0).to(tl.float64)
    return tl.where(is_some, logs + known * inverse, NOTHING)


@triton.jit
def tile_winner(
    row_ptr, tile, peak, bound, inverse, scale, seed, position, vocab, BLOCK: tl.constexpr
):
    """Best score of a tile among the tokens with a logit above `bound`, its token and logit.

    Tokens are scored in the order of their bounds, until none can be better.
    """
    index, x = load_tile(row_ptr, tile, vocab, BLOCK)
    powers = tile_powers(x, peak, scale)
    ratios = tile_ratios(x, powers, bound, tile, seed, position, BLOCK)
    best = tl.full([], NOTHING, tl.float64)
    token = tl.full([], 0, tl.int32)
    logit = tl.full([], NOTHING, tl.float32)
    floor = tl.full([], 0.0, tl.float32)
    top, place = tl.max(ratios, 0, return_indices=True)
    while top >= floor:
        i = tile * BLOCK + place
        value = tl.load(row_ptr + i)
        score = row_score(value, token_word(i, seed, position), inverse)
        is_better = (score > best) | ((score == best) & (i < token))
        best = tl.where(is_better, score, best)
        token = tl.where(is_better, i, token)
        logit = tl.where(is_better, value, logit)
        ahead = tl.minimum(best - peak.to(tl.float64) * inverse, 80.0)
        floor = (tl.exp(ahead) * (0.999 / 4294967296.0)).to(tl.float32)
        ratios = tl.where(index == i, -1.0, ratios)
        top, place = tl.max(ratios, 0, return_indices=True)
    return best, token, logit
