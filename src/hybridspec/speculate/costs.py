"""Cost of a step: seconds by requests, rows and drafts; measured, never assumed.

A captured step takes what its sizes take, a staircase, so each one is timed at start. Where steps
are run operator by operator, their cost is learnt from those that ran.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["CostTable", "Costs", "LearntCosts", "row_budgets"]

# Rows for each request, beside whole numbers: few enough to capture, close enough to waste little.
_SHARES = {1: (), 8: (1.5,), 64: (1.25, 1.5, 1.75, 2.5)}
_CLIP = 2.0  # a step that takes so many times what was expected was held up by something else
_RATE = 0.05  # weight of the newest step


def row_budgets(num_requests: int, num_drafts: int) -> list[int]:
    """Return the numbers of rows, rising, that a step of so many requests may verify.

    Args:
        num_requests: requests of the step; each has one row in any case.
        num_drafts: most drafts k of one request.
    """
    shares = next(more for least, more in reversed(_SHARES.items()) if num_requests >= least)
    whole = [1.0 + j for j in range(num_drafts + 1)]
    chosen = {*whole, *(share for share in shares if share < whole[-1])}
    return sorted({math.ceil(share * num_requests) for share in chosen})


class Costs(Protocol):
    """Says how long steps take.

    Attributes:
        is_vague: whether steps of different sizes have to be seen, whatever they promise.
    """

    @property
    def is_vague(self) -> bool: ...

    def budgets(self, num_requests: int) -> Sequence[int]:
        """Return the numbers of rows, rising, that a step of so many requests may verify."""
        ...

    def seconds(self, num_requests: int, rows: int, drafts: int) -> float:
        """Return how long a step takes.

        Args:
            num_requests: requests that run.
            rows: one of their `budgets`.
            drafts: how many the step proposes for each request, at its end.
        """
        ...

    def note(self, num_requests: int, rows: int, drafts: int, seconds: float) -> None:
        """Take in how long a step took; arguments as in `seconds`."""
        ...


@dataclass(slots=True, kw_only=True)
class CostTable:
    """Measured seconds of captured steps, and what live requests have added since.

    Attributes:
        verify: by requests and rows, all that comes before proposing.
        draft: by requests, what proposing 0, 1, ... k drafts takes.
        per_request: what each request adds, such as reading keys that were not there when the table
            was measured; follows the steps that run.
    """

    verify: Mapping[int, Mapping[int, float]]
    draft: Mapping[int, Sequence[float]]
    per_request: float = 0.0
    _sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._sizes = sorted(self.verify)

    @property
    def is_vague(self) -> bool:
        return False

    def size(self, num_requests: int) -> int:
        """Return the captured number of requests that so many take."""
        return self._sizes[min(bisect_left(self._sizes, num_requests), len(self._sizes) - 1)]

    def sizes_of(self, counts: Sequence[int]) -> list[int]:
        """Return the captured numbers of requests that these take, each once."""
        return sorted({self.size(count) for count in counts})

    def as_dict(self) -> dict[str, Any]:
        """Return seconds by requests and rows, by requests and drafts, and for each request."""
        return {
            "verify": {size: dict(line) for size, line in self.verify.items()},
            "draft": {size: list(line) for size, line in self.draft.items()},
            "per_request": self.per_request,
        }

    def budgets(self, num_requests: int) -> Sequence[int]:
        """Return the captured numbers of rows; see `Costs`."""
        return list(self.verify[self.size(num_requests)])

    def seconds(self, num_requests: int, rows: int, drafts: int) -> float:
        """Look up how long a step takes; see `Costs`."""
        size = self.size(num_requests)
        captured = self.verify[size][rows] + self.draft[size][drafts]
        return max(captured + self.per_request * num_requests, 0.1 * captured)

    def note(self, num_requests: int, rows: int, drafts: int, seconds: float) -> None:
        """Take in how long a step took; see `Costs`."""
        expected = self.seconds(num_requests, rows, drafts)
        error = min(max(seconds, expected / _CLIP), expected * _CLIP) - expected
        self.per_request += _RATE * error / num_requests


class LearntCosts:
    """Seconds as a sum of what a step, its rows and its drafts take, fitted to the newest steps.

        seconds = a + b rows + c drafts + d requests drafts,        a, b, c, d >= 0

    Least squares with forgetting; where steps did not vary, the proportions of a small model on a
    CPU stand in.

    Args:
        num_drafts: most drafts k of one request.
    """

    _PROPORTIONS = (0.9, 0.06, 0.1, 0.02)  # about those of the bundled model, two cores
    _FORGET = 0.99
    _PRIOR = 0.5  # steps that the proportions count for
    _WARM = 2  # steps that are slow because they are the first ones
    _FIRST, _AGAIN, _EVERY = 8, 3, 256  # steps of different sizes: at first, and from time to time

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self._weights = list(self._PROPORTIONS)
        self._squares = [[0.0] * 4 for _ in range(4)]
        self._products = [0.0] * 4
        self._scale: float | None = None
        self._num_noted = 0

    @property
    def is_vague(self) -> bool:
        return self._num_noted < self._FIRST or self._num_noted % self._EVERY < self._AGAIN

    def budgets(self, num_requests: int) -> Sequence[int]:
        """Return numbers of rows; see `Costs`."""
        return row_budgets(num_requests, self.num_drafts)

    def seconds(self, num_requests: int, rows: int, drafts: int) -> float:
        """Estimate how long a step takes; see `Costs`."""
        values = (1.0, rows, drafts, num_requests * drafts)
        return sum(weight * value for weight, value in zip(self._weights, values, strict=True))

    def note(self, num_requests: int, rows: int, drafts: int, seconds: float) -> None:
        """Take in how long a step took; see `Costs`."""
        expected = self.seconds(num_requests, rows, drafts)
        self._num_noted += 1
        if self._num_noted <= self._WARM:
            return
        if self._scale is None:
            self._scale = seconds / expected
        elif self._num_noted > self._FIRST:
            seconds = min(max(seconds, expected / _CLIP), expected * _CLIP)
        values = (1.0, float(rows), float(drafts), float(num_requests * drafts))
        for i, left in enumerate(values):
            self._products[i] = self._FORGET * self._products[i] + left * seconds
            for j, right in enumerate(values):
                self._squares[i][j] = self._FORGET * self._squares[i][j] + left * right
        self._weights = self._fitted(self._scale)

    def _fitted(self, scale: float) -> list[float]:
        """Solve the normal equations, a little drawn to the proportions."""
        rows = [[*line, total] for line, total in zip(self._squares, self._products, strict=True)]
        for i, share in enumerate(self._PROPORTIONS):
            rows[i][i] += self._PRIOR
            rows[i][4] += self._PRIOR * scale * share
        # Gauss without pivots: the matrix is positive definite.
        for i in range(4):
            for j in range(4):
                if j != i:
                    factor = rows[j][i] / rows[i][i]
                    rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
        floor = 1e-3 * scale
        return [max(rows[i][4] / rows[i][i], floor * self._PROPORTIONS[i]) for i in range(4)]
