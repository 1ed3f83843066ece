"""Pools whose slots lie gigabytes apart: parts of a file that are not touched take no room."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

__all__ = ["far_apart"]


def far_apart(pool: Tensor, num_slots: int, step: int, file: Path) -> Tensor:
    """Return a pool [num_slots, ...] on the CPU, with zeros in slots `step` elements apart.

    Args:
        pool: what slots look like; only its sizes and dtype matter.
        num_slots: slots of the result.
        step: its first stride.
        file: a new file, in which it lies.
    """
    inner = torch.empty(pool.shape[1:], device="meta")
    size = (num_slots - 1) * step + inner.numel()
    flat = torch.from_file(str(file), shared=True, size=size, dtype=pool.dtype)
    return flat.as_strided((num_slots, *inner.shape), (step, *inner.stride()))
