"""Whether a device adds up rows in one order, however many there are at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["explain_rows", "random_rows"]


def random_rows(count: int, columns: int, like: Tensor) -> Tensor:
    """Return normal numbers [count, columns] on the device and in the dtype of a tensor."""
    generator = torch.Generator(like.device).manual_seed(0)
    rows = torch.randn(count, columns, generator=generator, device=like.device)
    return rows.to(like.dtype)


def explain_rows(
    run: Callable[[slice], Tensor], counts: Sequence[int], what: str, whose: str
) -> str | None:
    """Compute rows in parts, at both ends, and all together; say what differs, or return None.

    Args:
        run: computes some of twice as many rows as the last of `counts`.
        counts: rows of a part, rising.
        what, whose: what is computed, as the answer has it.
    """
    most = 2 * counts[-1]
    expected = run(slice(0, most))
    for count in counts:
        for first in (0, most - count):
            rows = slice(first, first + count)
            found = run(rows)
            if not torch.equal(found, expected[rows]):
                differing = int((found != expected[rows]).sum())
                return (
                    f"{what} of {count} and {most} rows{whose} differ in {differing} of "
                    f"{found.numel()} sums"
                )
    return None
