"""The product in PyTorch operators; torch promises no order of its sums."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._library import Written
from hybridspec.ops.norms.reference import widened

__all__ = ["multiply"]


def multiply(x: Tensor, weight: Tensor, residual: Tensor | None, out: Written[Tensor]) -> None:
    """See `api.multiply`."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    product = widened(x, dtype) @ widened(weight, dtype).t()
    if residual is not None:
        product += residual
    out.copy_(product)
