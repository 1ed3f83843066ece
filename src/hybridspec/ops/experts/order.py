"""Does a device add up a mixture of experts in the same order for any number of rows?"""

from __future__ import annotations

import torch

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
    most, count, size = 2 * _COUNTS[-1], *matrices.down.shape[:2]
    like = matrices.down
    generator = torch.Generator(like.device).manual_seed(0)

    def random(columns: int) -> torch.Tensor:
        rows = torch.randn(most, columns, generator=generator, device=like.device)
        return rows.to(like.dtype)

    x, scores, before = random(size), random(count + 1), random(size)

    def mixed(rows: slice) -> torch.Tensor:
        return mix(
            x[rows], scores[rows], matrices, before[rows].clone(),
            experts_per_row=min(_PER_ROW, count), backend="ordered",
        )  # fmt: skip

    expected = mixed(slice(None))
    for part in _COUNTS:
        for first in (0, most - part):
            rows = slice(first, first + part)
            found = mixed(rows)
            if not torch.equal(found, expected[rows]):
                differing = int((found != expected[rows]).sum())
                return (
                    f"mixtures of {part} and {most} rows, {count} experts of "
                    f"{matrices.down.shape[2]}, differ in {differing} of {found.numel()} values"
                )
    return None
