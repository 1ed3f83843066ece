"""Plain PyTorch form of the gates: oracle of the kernel, and what runs without one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops._library import Written
from hybridspec.ops.norms import widened

__all__ = ["gated"]


def gated(x: Tensor, gate: Tensor, out: Written[Tensor], is_silu: bool) -> None:
    """Write x * silu(gate) or x * sigmoid(gate)."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = widened(gate, dtype)
    out.copy_(widened(x, dtype) * (F.silu(wide) if is_silu else wide.sigmoid()))
