"""Contracts of cursors and marks: sizes, dtypes and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._checks import Dims, check, check_dtype, check_last_stride, check_option

__all__ = ["check_capacity", "check_cursors", "check_marks", "check_threshold"]


def check_cursors(dims: Dims, **cursors: Tensor) -> None:
    """Raise unless per-slot cursors are [S] int32."""
    for name, tensor in cursors.items():
        check(name, tensor, "S", dims)
        check_dtype(name, tensor, torch.int32)
        check_last_stride(name, tensor)


def check_marks(dims: Dims, **marks: Tensor) -> None:
    """Raise unless per-request tensors are [B]: `is_fold` int8, all others int32."""
    for name, tensor in marks.items():
        check(name, tensor, "B", dims)
        check_dtype(name, tensor, torch.int8 if name == "is_fold" else torch.int32)
        check_last_stride(name, tensor)


def check_capacity(ring_capacity: int) -> None:
    """Raise unless a number of ring rows is one that rings have."""
    check_option("ring_capacity", ring_capacity, int)
    if ring_capacity < 1 or ring_capacity & (ring_capacity - 1):
        raise ValueError(f"ring_capacity: expected a power of two, got {ring_capacity}")


def check_threshold(fold_threshold: int) -> None:
    """Raise unless a fewest number of live rows can be compared with an int32 cursor."""
    check_option("fold_threshold", fold_threshold, int, low=-(2**31), high=2**31 - 1)
