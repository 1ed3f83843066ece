"""Launches of the kernels on cursors and slots; no host sync, nothing allocated but copies."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._triton_support import FLOATS, INTEGERS, explain_tensors

__all__ = [
    "commit",
    "copy_slots",
    "decide_folds",
    "explain_cursors",
    "explain_slots",
    "reset_slots",
]

_BLOCK = 128
_BLOCK_ELEMENTS = 1024


def explain_cursors(cursor: Tensor, *others: Tensor) -> str | None:
    """Say why the kernels on cursors cannot serve these tensors, or return None."""
    named = [("cursor", cursor), *((f"argument {i}", t) for i, t in enumerate(others))]
    return explain_tensors(named, INTEGERS)


def explain_slots(slots: Tensor, pools: list[Tensor]) -> str | None:
    """Say why the kernels on whole slots cannot serve these pools, or return None."""
    named = [("slots", slots), *((f"pools[{i}]", pool) for i, pool in enumerate(pools))]
    for name, pool in named:
        if pool.dim() > 4:
            return f"{name} has {pool.dim()} dimensions, the kernel takes up to 4"
    return explain_tensors(named, (*FLOATS, *INTEGERS))


def decide_folds(
    history_len: Tensor,
    ring_start: Tensor | None,
    slots: Tensor,
    num_verify_tokens: Tensor,
    is_fold: Tensor,
    max_window: int,
) -> None:
    """Launch `triton_cursors.decide_folds_kernel`."""
    from hybridspec.ops.ring.triton_cursors import decide_folds_kernel

    num_requests = slots.shape[0]
    with torch.cuda.device_of(slots):
        decide_folds_kernel[(-(-num_requests // _BLOCK),)](
            history_len, ring_start, slots, num_verify_tokens, is_fold, num_requests, max_window,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


def commit(
    seq_len: Tensor,
    ring_start: Tensor,
    history_len: Tensor,
    slots: Tensor,
    is_fold: Tensor,
    num_verify_tokens: Tensor,
    num_committed: Tensor,
    ring_capacity: int,
) -> None:
    """Launch `triton_cursors.commit_kernel`: one launch for all layers of a step."""
    from hybridspec.ops.ring.triton_cursors import commit_kernel

    num_requests = slots.shape[0]
    with torch.cuda.device_of(slots):
        commit_kernel[(-(-num_requests // _BLOCK),)](
            seq_len, ring_start, history_len, slots, is_fold, num_verify_tokens, num_committed,
            num_requests, RING=ring_capacity, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


def restart_windows(
    ring_start: Tensor,
    history_len: Tensor,
    slots: Tensor | None,
    fold_threshold: int,
    ring_capacity: int,
) -> None:
    """Launch `triton_cursors.restart_windows_kernel`."""
    from hybridspec.ops.ring.triton_cursors import restart_windows_kernel

    num_requests = history_len.shape[0]
    with torch.cuda.device_of(history_len):
        restart_windows_kernel[(-(-num_requests // _BLOCK),)](
            ring_start, history_len, slots, fold_threshold, num_requests,
            RING=ring_capacity, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


def copy_slots(pools: list[Tensor], src_slots: Tensor, dst_slots: Tensor) -> None:
    """Gather all sources of a pool, then write them with `triton_copies.write_slots_kernel`."""
    from hybridspec.ops.ring.triton_copies import write_slots_kernel

    sources = src_slots.clamp_min(0).long()
    for pool in pools:
        values = pool.index_select(0, sources)
        count, layout = _layout(pool)
        with torch.cuda.device_of(pool):
            write_slots_kernel[(src_slots.shape[0], -(-count // _BLOCK_ELEMENTS))](
                pool, values, src_slots, dst_slots, count, *layout,
                BLOCK=_BLOCK_ELEMENTS, num_warps=4,
            )  # fmt: skip


def reset_slots(pools: list[Tensor], slots: Tensor) -> None:
    """Launch `triton_copies.reset_slots_kernel` once per pool."""
    from hybridspec.ops.ring.triton_copies import reset_slots_kernel

    for pool in pools:
        count, layout = _layout(pool)
        with torch.cuda.device_of(pool):
            reset_slots_kernel[(slots.shape[0], -(-count // _BLOCK_ELEMENTS))](
                pool, slots, count, *layout, BLOCK=_BLOCK_ELEMENTS, num_warps=4
            )


def _layout(pool: Tensor) -> tuple[int, tuple[int, ...]]:
    """Elements of a slot, then the sizes and strides that the kernels take, padded to 4 axes."""
    missing = 4 - pool.dim()
    sizes = (1,) * missing + tuple(pool.shape[1:])
    strides = (0,) * missing + tuple(pool.stride()[1:])
    return sizes[0] * sizes[1] * sizes[2], (*sizes[1:], pool.stride(0), *strides)
