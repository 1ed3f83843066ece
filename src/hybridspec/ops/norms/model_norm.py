"""The norm of the models: over the hidden size, over heads, and gated behind a recurrent layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, linalg

from hybridspec.ops.norms.api import gated_rms_norm, rms_norm
from hybridspec.ops.norms.reference import widened

__all__ = ["RmsNorm"]


class RmsNorm:
    """Root-mean-square norm of the last dimension.

    y = x / sqrt(mean(x^2) + eps) * weight

    On a GPU it is one launch, `api.rms_norm`. On a CPU, where `F.rms_norm` is eight operators, the
    four of the same equation as x * (weight sqrt(D)) / hypot(|x|, sqrt(D eps)) take half the time.

    Args:
        weight: the whole factor (a stored zero-centred weight plus one), [D], or [heads, D] where
            every head has its own; fp32 or fp64.
        eps: added to the mean square.

    Source:
        RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), equation 4.
    """

    __slots__ = ("_floor", "eps", "scaled_weight", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight = weight
        self.eps = eps
        self.scaled_weight = weight * size**0.5
        self._floor = weight.new_tensor((eps * size) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of activations [..., D], in their dtype.

        Numerics: computed in the dtype of the weight and rounded once, at the end.
        """
        if x.is_cuda:
            return rms_norm(x, self.weight, self.eps)
        return widened(self.wide(x), x.dtype)

    def forward_gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return norm(x) * silu(gate), both [..., D], in the dtype of `x`.

        Numerics: computed in the dtype of the weight and rounded once, at the end. The checkpoints'
            own modelling code rounds the normalised row as well, before it meets the weight.

        Source:
            The output norm of Gated Delta Networks (Yang et al. 2025, arXiv:2412.06464), section
            3.4.
        """
        if x.is_cuda:
            return gated_rms_norm(x, gate, self.weight, self.eps)
        wide = self.wide(x)
        return widened(wide.mul_(F.silu(widened(gate, wide.dtype))), x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """Return the norm of activations [..., D], not rounded to their dtype; a new tensor."""
        wide = widened(x, self.weight.dtype)
        length = linalg.vector_norm(wide, 2, -1, True)
        return wide.mul(self.scaled_weight).div_(length.hypot_(self._floor))
