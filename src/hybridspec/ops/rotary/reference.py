"""Plain PyTorch form of norm and rotation: oracle of the kernel, and what runs without one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops.norms import widened

__all__ = ["norm_and_rotate"]


def norm_and_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, out: Tensor
) -> None:
    """See `api.norm_and_rotate`."""
    heads = F.rms_norm(widened(x, weight.dtype), weight.shape[1:], None, eps) * weight
    rotated = heads.narrow(-1, 0, cos.shape[-1])
    first, second = rotated.chunk(2, -1)
    swapped = torch.cat((second, first), -1)
    rotated.mul_(cos).addcmul_(swapped, sin)
    out.copy_(heads)
