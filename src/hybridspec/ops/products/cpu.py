"""The product in PyTorch operators; torch promises no order of its sums."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._library import Written
from hybridspec.ops.norms.reference import widened

__all__ = ["multiply", "multiply_in_parts"]


def multiply(x: Tensor, weight: Tensor, residual: Tensor | None, out: Written[Tensor]) -> None:
    """See `api.multiply`."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    product = widened(x, dtype) @ widened(weight, dtype).t()
    if residual is not None:
        product += residual
    out.copy_(product)


def multiply_in_parts(x: Tensor, weight: Tensor, parts: Written[Tensor]) -> None:
    """See `api.multiply_in_parts`."""
    num, dtype = parts.shape[0], parts.dtype
    for part, some_x, some_weight in zip(parts, x.chunk(num, 1), weight.chunk(num, 1), strict=True):
        part.copy_(widened(some_x, dtype) @ widened(some_weight, dtype).t())
