"""The mixture of many rows on a GPU: torch's grouped product, without a host sync."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops._checks import dtype_name
from hybridspec.ops.experts.call import Matrices
from hybridspec.ops.experts.cpu import mix_with

__all__ = ["explain", "mix", "products_at_once"]


def explain(
    x: Tensor, scores: Tensor, matrices: Matrices, out: Tensor, per_row: int, is_normalized: bool
) -> str | None:
    """Return why torch's grouped product does not support a call, or None."""
    if x.device.type != "cuda":
        return "on a CPU it is slower where experts have no rows"
    if x.dtype is not torch.bfloat16:
        return f"takes bfloat16 only, not {dtype_name(x.dtype)}"
    return None


def mix(
    x: Tensor, scores: Tensor, matrices: Matrices, out: Tensor, per_row: int, is_normalized: bool
) -> None:
    """See `api.mix`."""
    mix_with(products_at_once, x, scores, matrices, out, per_row, is_normalized)


def products_at_once(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of x [N, in] up to ends[e] with weight[e] [out, in], for every expert e."""
    return F.grouped_mm(x, weight.mT, offs=ends)
