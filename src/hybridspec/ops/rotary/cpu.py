"""Norm and rotation in PyTorch operators: what runs without the kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops._library import Written
from hybridspec.ops.norms import widened

__all__ = ["norm_and_rotate"]


def norm_and_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Written[Tensor], eps: float
) -> None:
    """See `api.norm_and_rotate`."""
    heads = F.rms_norm(widened(x, weight.dtype), weight.shape[1:], None, eps) * weight
    rotated = heads.narrow(-1, 0, cos.shape[-1])
    first, second = rotated.chunk(2, -1)
    swapped = torch.cat((second, first), -1)
    rotated.mul_(cos).addcmul_(swapped, sin)
    out.copy_(heads)
