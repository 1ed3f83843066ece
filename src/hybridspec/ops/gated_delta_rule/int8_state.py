"""The 8-bit form of a checkpoint: integers, and one factor for every 32 neighbours along K.

    S[v, k] = state_scale[v, k // 32] * state[v, k]

The factor is chosen so that the largest magnitude of a group becomes 127 exactly; a group that is
rounded again therefore keeps its bits. `docs/kernels/gdn_8bit.md` compares it with other forms.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GROUP_SIZE", "SCALE_DTYPE", "quantise", "widen"]

GROUP_SIZE = 32
SCALE_DTYPE = torch.bfloat16
_LARGEST = 127
_VANISHING = 1e-30  # of a whole group; its factor would come near the end of the exponents


def widen(state: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values [..., K] of integers [..., K] and factors [..., K / 32]; exact in fp32."""
    groups = state.unflatten(-1, (-1, GROUP_SIZE))
    return (groups.to(dtype) * scale.unsqueeze(-1).to(dtype)).flatten(-2)


def quantise(values: Tensor, state: Tensor, scale: Tensor) -> None:
    """Round values [..., K] into integers [..., K] and factors [..., K / 32].

    scale = bf16(max |x| / 127), 0 where max |x| < 1e-30;  state = round(x / scale), ties to even

    The division is a product with the inverse, both times. A group that is not finite becomes one
    that reads as NaN.
    """
    groups = values.unflatten(-1, (-1, GROUP_SIZE))
    largest = groups.abs().amax(-1).float()
    rounded = (largest * (1 / _LARGEST)).to(SCALE_DTYPE).masked_fill_(largest < _VANISHING, 0.0)
    wide = rounded.to(values.dtype)
    inverse = torch.where(wide > 0, wide.reciprocal(), 0.0)
    integers = (groups * inverse.unsqueeze(-1)).round_().nan_to_num_(0.0)
    state.copy_(integers.flatten(-2))
    scale.copy_(rounded)
