"""Does a device add up the sums of a product in the same order for any number of rows?"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops._row_order import cancelling_product, explain_rows
from hybridspec.ops.products.api import multiply
from hybridspec.ops.products.launch import ROW_COUNTS

__all__ = ["explain_order", "rows_as_torch"]


def explain_order(weight: Tensor) -> str | None:
    """Multiply rows by a weight with all tiles there are; say what differs, or return None.

    Tiles of few and of many rows use different matrix instructions. On Hopper these were seen to
    add up alike, which no vendor promises, so it is checked on the device of the weights.

    Args:
        weight: [F, D], whose shape and dtype matter; in.
    """
    x, weight = cancelling_product(2 * ROW_COUNTS[-1], weight)
    return explain_rows(
        lambda rows: multiply(x[rows], weight, dtype=torch.float32),
        ROW_COUNTS,
        "products",
        f" with a weight of {list(weight.shape)}",
    )


def rows_as_torch(weight: Tensor, counts: Iterable[int]) -> set[int]:
    """Return the numbers of rows for which torch's product has the same bits as ours.

    Where a library does not cut sums into parts its chain of instructions is the same one. Sums
    that are nothing but rounding show it, however few there are.

    Args:
        weight: [F, D], whose shape and dtype matter; in.
        counts: numbers of rows to look at.
    """
    asked = sorted(set(counts))
    if not asked:
        return set()
    x, weight = cancelling_product(asked[-1], weight)
    expected = multiply(x, weight)
    return {n for n in asked if torch.equal(F.linear(x[:n], weight), expected[:n])}
