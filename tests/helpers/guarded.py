"""Tensors that end where memory does: who reads past them stops the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

__all__ = ["at_the_end_of_memory"]


def at_the_end_of_memory(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU, followed by a page that must not be touched."""
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    no_access = 0
    failed = ctypes.CDLL(None).mprotect(
        ctypes.c_void_p(first + size), ctypes.c_size_t(mmap.PAGESIZE), no_access
    )
    assert not failed
    offset = size - tensor.nbytes
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return copy.view(tensor.shape).copy_(tensor)
