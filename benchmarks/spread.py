"""Median and outer fifths of what was measured; needs no GPU and no Triton."""

from __future__ import annotations

import statistics

__all__ = ["median_and_fifths"]


def median_and_fifths(values: list[float]) -> tuple[float, float, float]:
    """Return the median, the 20th and the 80th percentile of one value or more."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return statistics.median(values), fifths[0], fifths[-1]
