"""Plain PyTorch form of norm and rotation: oracle of the kernel, and CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops.norms import widened

__all__ = ["norm_and_rotate"]


def norm_and_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, out: Tensor
) -> None:
    """See `api.norm_and_rotate`.

    The norm is x * (weight sqrt(D)) / hypot(|x|, sqrt(D eps)): half the operators of the usual
    form, which is what counts on a CPU.
    """
    size = weight.shape[1]
    wide = widened(x, weight.dtype)
    length = torch.linalg.vector_norm(wide, 2, -1, True)
    heads = wide.mul(weight * size**0.5).div_(
        length.hypot_(weight.new_full((), (eps * size) ** 0.5))
    )
    rotated = heads.narrow(-1, 0, cos.shape[-1])
    first, second = rotated.chunk(2, -1)
    swapped = torch.cat((second, first), -1)
    rotated.mul_(cos).addcmul_(swapped, sin)
    out.copy_(heads)
