"""Launches of the kernels on cursors and slots; no host sync, nothing allocated but copies."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops._triton_support import FLOATS, INTEGERS, explain_tensors
from hybridspec.ops.ring.view import Marks, Windows

__all__ = [
    "commit",
    "copy_slots",
    "decide_folds",
    "explain_cursors",
    "explain_slots",
    "reset_slots",
    "restart_windows",
]

_BLOCK = 128
_BLOCK_ELEMENTS = 1024


def explain_cursors(*arguments: Any) -> str | None:
    """Return why the kernels on cursors do not support these arguments, or None."""
    flat = itertools.chain(*(part if isinstance(part, tuple) else (part,) for part in arguments))
    tensors = [part for part in flat if isinstance(part, Tensor)]
    return explain_tensors([(f"cursor {i}", part) for i, part in enumerate(tensors)], INTEGERS)


def explain_slots(*arguments: Any) -> str | None:
    """Return why the kernels on whole slots do not support these slots and pools, or None."""
    *slots, pools = arguments
    named = [("slots", slots[0]), *((f"pools[{i}]", pool) for i, pool in enumerate(pools))]
    for name, pool in named:
        if pool.dim() > 4:
            return f"{name} has {pool.dim()} dimensions, the kernel takes up to 4"
    return explain_tensors(named, (*FLOATS, *INTEGERS))


def decide_folds(
    windows: Windows, slots: Tensor, num_verify_tokens: Tensor, is_fold: Tensor, max_window: int
) -> None:
    """Launch `triton_cursors.decide_folds_kernel`."""
    from hybridspec.ops.ring.triton_cursors import decide_folds_kernel

    _launch_requests(
        decide_folds_kernel, slots, windows.history_len, windows.ring_start, slots,
        num_verify_tokens, is_fold, slots.shape[0], max_window,
    )  # fmt: skip


def commit(
    seq_len: Tensor, windows: Windows, marks: Marks, num_committed: Tensor, ring_capacity: int
) -> None:
    """Launch `triton_cursors.commit_kernel`: one launch for all layers of a step."""
    from hybridspec.ops.ring.triton_cursors import commit_kernel

    _launch_requests(
        commit_kernel, num_committed, seq_len, *windows, *marks, num_committed,
        num_committed.shape[0], RING=ring_capacity,
    )  # fmt: skip


def restart_windows(
    windows: Windows, slots: Tensor | None, fold_threshold: int, ring_capacity: int
) -> None:
    """Launch `triton_cursors.restart_windows_kernel`."""
    from hybridspec.ops.ring.triton_cursors import restart_windows_kernel

    history_len = windows.history_len
    _launch_requests(
        restart_windows_kernel, history_len, *windows, slots, fold_threshold, history_len.shape[0],
        RING=ring_capacity,
    )  # fmt: skip


def _launch_requests(kernel: Any, requests: Tensor, *arguments: Any, **constants: int) -> None:
    """Launch programs for blocks of the requests that a tensor [B] has."""
    with torch.cuda.device_of(requests):
        kernel[(-(-requests.shape[0] // _BLOCK),)](
            *arguments, BLOCK=_BLOCK, num_warps=4, **constants
        )


def copy_slots(src_slots: Tensor, dst_slots: Tensor, pools: list[Tensor]) -> None:
    """Gather all sources of a pool, then write them with `triton_copies.write_slots_kernel`."""
    from hybridspec.ops.ring.triton_copies import write_slots_kernel

    sources = src_slots.clamp_min(0).long()
    for pool in pools:
        values = pool.index_select(0, sources)
        _launch_copy(write_slots_kernel, pool, values, src_slots, dst_slots)


def reset_slots(slots: Tensor, pools: list[Tensor]) -> None:
    """Launch `triton_copies.reset_slots_kernel` once per pool."""
    from hybridspec.ops.ring.triton_copies import reset_slots_kernel

    for pool in pools:
        _launch_copy(reset_slots_kernel, pool, slots)


def _launch_copy(kernel: Any, pool: Tensor, *others: Tensor) -> None:
    count, layout = _layout(pool)
    with torch.cuda.device_of(pool):
        kernel[(others[-1].shape[0], -(-count // _BLOCK_ELEMENTS))](
            pool, *others, count, *layout, BLOCK=_BLOCK_ELEMENTS, num_warps=4
        )


def _layout(pool: Tensor) -> tuple[int, tuple[int, ...]]:
    """Elements of a slot, then the sizes and strides that the kernels take, padded to 4 axes."""
    missing = 4 - pool.dim()
    sizes = (1,) * missing + tuple(pool.shape[1:])
    strides = (0,) * missing + tuple(pool.stride()[1:])
    return sizes[0] * sizes[1] * sizes[2], (*sizes[1:], pool.stride(0), *strides)
