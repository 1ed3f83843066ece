"""Tensors that end where memory does: who reads past them stops the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from helpers.gdn_cases import VerifyCall

__all__ = ["at_the_end_of_memory", "move_to_the_end_of_memory"]


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


def move_to_the_end_of_memory(call: VerifyCall) -> None:
    """Let all tensors of a call end where nothing may be read any more."""
    usual, ring = call.inputs, call.pools.ring
    call.inputs = lambda: [at_the_end_of_memory(part) for part in usual()]
    for name in ("slot_tensor", "cu_seqlens", "is_fold"):
        setattr(call, name, at_the_end_of_memory(getattr(call, name)))
    call.pools.state = at_the_end_of_memory(call.pools.state)
    names = ("k", "u", "cum_log_decay", "ring_start", "history_len")
    guarded = {name: at_the_end_of_memory(getattr(ring, name)) for name in names}
    call.pools.ring = ring._replace(**guarded)
