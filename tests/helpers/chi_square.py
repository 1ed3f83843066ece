"""Pearson's chi-square test of observed counts against expected probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["chi_square_p_value"]


def chi_square_p_value(counts: Tensor, probs: Tensor) -> float:
    """Probability of counts at least this far from their expectation.

    Args:
        counts: observations of each outcome, [V].
        probs: expected probability of each outcome, [V]; outcomes of probability 0 must not occur.

    Returns:
        The p-value; 0 if an impossible outcome occurred.
    """
    counts, probs = counts.double(), probs.double()
    is_possible = probs > 0
    if counts[~is_possible].any():
        return 0.0
    expected = probs[is_possible] / probs.sum() * counts.sum()
    assert expected.min() > 5, "too few observations for the test"
    statistic = ((counts[is_possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((int(is_possible.sum()) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()
