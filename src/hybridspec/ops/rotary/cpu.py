"""Norm and rotation in PyTorch operators: what runs without the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._library import Written
from hybridspec.ops.norms import RmsNorm

__all__ = ["norm_and_rotate", "rotate_"]


def norm_and_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Written[Tensor], eps: float
) -> None:
    """See `api.norm_and_rotate`."""
    heads = RmsNorm(weight, eps).wide(x)
    rotate_(heads, cos, sin)
    out.copy_(heads)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the leading dimensions of every head, in place.

    Args:
        x: heads of packed rows, [N, heads, D]; in-out.
        cos: cosines of each row's angles, both halves, [N, 1, R], R <= D; in.
        sin: sines, those of the first half negated, [N, 1, R]; in.
    """
    rotated = x.narrow(-1, 0, cos.shape[-1])
    first, second = rotated.chunk(2, -1)
    swapped = torch.cat((second, first), -1)
    rotated.mul_(cos).addcmul_(swapped, sin)
