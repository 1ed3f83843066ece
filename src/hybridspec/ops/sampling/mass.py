"""Probability mass as integers, so that no sum depends on its order; the kernels do the same.

    mass of token i, for the largest logit m_t of its tile t of 2048 tokens
        e_i = floor(2^30 exp2((x_i - m_t) c)),     c = log2(e) / temperature
    mass of the tokens of a row above a pivot, in units of 2^-30 of the likeliest token
        A(p) = sum_t floor(exp2((m_t - max) c) sum_{i in t, x_i > p} e_i)

exp2 is the polynomial below in fp32, each operation rounded once: 3e-6 off the exponential.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["COEFFICIENTS", "LEAST_EXPONENT", "LOG2_E", "ROUNDER", "TILE", "TiledMass", "exp2"]

TILE = 2048
LOG2_E = 1.4426950408889634
LEAST_EXPONENT = -64.0
ROUNDER = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer and leaves that in the low bits
# Of 2^f for |f| <= 1/2: least largest relative error of the polynomials with the value 1 at 0.
COEFFICIENTS = (0.009582853, 0.055906426, 0.24024099, 0.69312419, 1.0)


def exp2(y: Tensor) -> Tensor:
    """Power of two, fp32; what lies below 2^-64 becomes that."""
    y = y.clamp(min=LEAST_EXPONENT)
    shifted = y + ROUNDER
    fraction = y - (shifted - ROUNDER)
    power = fraction * COEFFICIENTS[0] + COEFFICIENTS[1]
    for coefficient in COEFFICIENTS[2:]:
        power = power * fraction + coefficient
    return (power.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledMass:
    """Masses of the tokens of some rows.

    Attributes:
        scale: [n, 1] fp32, c.
        largest: [n, 1] fp32.
        masses: [n, tiles, size] int64, e.
        weights: [n, tiles] fp64, of the tiles.
    """

    scale: Tensor
    largest: Tensor
    masses: Tensor
    weights: Tensor

    @classmethod
    def of(cls, x: Tensor, temperature: Tensor) -> TiledMass:
        """Find the masses of rows whose temperatures are above 0."""
        scale = (LOG2_E / temperature.double()).clamp(max=2.0**100).to(torch.float32).unsqueeze(-1)
        tiles = _tiled(x, -torch.inf)
        peaks = tiles.amax(-1)
        largest = peaks.amax(-1, keepdim=True)
        # A tile in which nothing may be chosen has no largest logit to compare with.
        known = torch.where(peaks == -torch.inf, 0.0, peaks).unsqueeze(-1)
        powers = exp2((tiles - known) * scale.unsqueeze(-1))
        return cls(
            scale=scale,
            largest=largest,
            masses=(powers * 2.0**30).to(torch.int64),
            weights=exp2((peaks - largest) * scale).double(),
        )

    def of_rows(self, rows: Tensor) -> TiledMass:
        """Pick some of the rows."""
        return TiledMass(**{name: getattr(self, name)[rows] for name in self.__slots__})

    def where(self, is_counted: Tensor) -> Tensor:
        """Sum the masses of the tokens for which `is_counted`, [n, V], is true: [n] int64."""
        counted = torch.where(_tiled(is_counted, False), self.masses, 0).sum(-1)
        return (counted * self.weights).to(torch.int64).sum(-1)

    def share(self, x: Tensor) -> Tensor:
        """Probability of a token with logit x, [n, 1], as a share of the likeliest one's."""
        return exp2((x - self.largest) * self.scale)


def _tiled(values: Tensor, filler: float) -> Tensor:
    """[n, V] -> [n, tiles, size]; one tile of V tokens where they fit."""
    size = min(values.shape[1], TILE)
    padded = functional.pad(values, (0, -values.shape[1] % size), value=filler)
    return padded.view(values.shape[0], -1, size)
