"""Whether a device adds up rows in one order, however many there are at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["cancelling_product", "explain_rows", "random_rows"]


def random_rows(count: int, columns: int, like: Tensor) -> Tensor:
    """Return normal numbers [count, columns] on the device and in the dtype of a tensor."""
    generator = torch.Generator(like.device).manual_seed(0)
    rows = torch.randn(count, columns, generator=generator, device=like.device)
    return rows.to(like.dtype)


def cancelling_product(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [count, D] and a weight [F, D] whose product is rounding and nothing else.

    The terms of each sum are pairs that cancel, at places drawn at random. What is left of a sum
    depends on the order in which it was added up, so that two orders differ in nearly every
    element, also once it is rounded to 16 bits. Of sums at random only one in hundreds would.

    Args:
        count: rows.
        like: [F, D], whose shape, dtype and device matter; in.
    """
    num_columns, num_terms = like.shape
    generator = torch.Generator(like.device).manual_seed(0)
    order = torch.randperm(num_terms, generator=generator, device=like.device)
    places = (order[: num_terms // 2], order[num_terms // 2 :][: num_terms // 2])
    made = []
    for rows, sign in ((count, 1), (num_columns, -1)):
        half = random_rows(rows, num_terms // 2, like)
        one = torch.zeros(rows, num_terms, dtype=like.dtype, device=like.device)
        one[:, places[0]], one[:, places[1]] = half, sign * half
        made.append(one)
    return made[0], made[1]


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
