"""Does a device add up a mixture of experts in the same order for any number of rows?"""

from __future__ import annotations

from torch import Tensor

from hybridspec.ops._row_order import explain_rows, random_rows
from hybridspec.ops.experts.api import mix
from hybridspec.ops.experts.call import Matrices

__all__ = ["explain_order"]

_COUNTS = (1, 4, 5, 32, 256)  # between which launches differ
_PER_ROW = 2


def explain_order(matrices: Matrices) -> str | None:
    """Mix random rows in parts and all together; say what differs, or return None.

    Args:
        matrices: of a layer, whose shapes and dtype matter; in.
    """
    count, size, inner = matrices.down.shape
    widths = [size, count + 1, size]
    drawn = random_rows(2 * _COUNTS[-1], sum(widths), matrices.down).split(widths, dim=1)
    x, scores, before = (part.contiguous() for part in drawn)

    def mixed(rows: slice) -> Tensor:
        return mix(
            x[rows], scores[rows], matrices, before[rows].clone(),
            experts_per_row=min(_PER_ROW, count), backend="ordered",
        )  # fmt: skip

    return explain_rows(mixed, _COUNTS, "mixtures", f", {count} experts of {inner},")
