"""Whole slots: copying them in every pool of a layer or a model, and clearing them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybridspec.ops._library import register_kernel
from hybridspec.ops.ring import cpu, launch
from hybridspec.ops.ring.contracts import check_marks

__all__ = ["copy_slots", "reset_slots"]


def copy_slots(pools: Sequence[Tensor], src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy slots in every pool; all sources are read before any target is written.

    pool[dst_slots[i]] <- pool[src_slots[i]]

    Args:
        pools: tensors whose first dimension is the slot, cursors included, [S, ...]; in-out.
        src_slots: [P], int32; contiguous; in.
        dst_slots: no slot twice, [P], int32; pairs with a -1 are skipped; in.

    Raises:
        TypeError: for a wrong dtype, or for one tensor instead of a list.
        ValueError: for a wrong shape or stride.

    Numerics:
        Bits are copied.

    Source:
        README.md of this package.
    """
    _copy_slots(src_slots, dst_slots, _checked_pools(pools))


def reset_slots(pools: Sequence[Tensor], slots: Tensor) -> None:
    """Zero slots in every pool.

    pool[slots[i]] <- 0

    Args:
        pools: tensors whose first dimension is the slot, cursors included, [S, ...]; in-out.
        slots: [P], int32; -1 is skipped; in.

    Raises:
        TypeError: for a wrong dtype, or for one tensor instead of a list.
        ValueError: for a wrong shape or stride.

    Numerics:
        Exact zeros.

    Source:
        README.md of this package.
    """
    _reset_slots(slots, _checked_pools(pools))


def _checked_pools(pools: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(pools, Tensor) or not isinstance(pools, Sequence):
        raise TypeError(f"pools: expected a list of tensors [S, ...], got {type(pools).__name__}")
    for i, pool in enumerate(pools):
        if not isinstance(pool, Tensor):
            raise TypeError(f"pools[{i}]: expected a tensor [S, ...], got {type(pool).__name__}")
        if pool.dim() == 0 or pool.shape[0] != pools[0].shape[0]:
            raise ValueError(
                f"pools[{i}]: expected {pools[0].shape[0]} slots like pools[0], "
                f"got shape {list(pool.shape)}"
            )
    return list(pools)


def _check_copy_slots(src_slots: Tensor, dst_slots: Tensor, pools: list[Tensor]) -> None:
    check_marks({}, src_slots=src_slots, dst_slots=dst_slots)


_copy_slots = register_kernel(
    "ring.copy_slots", launch.explain_slots, launch.copy_slots, cpu.copy_slots, _check_copy_slots
)


def _check_reset_slots(slots: Tensor, pools: list[Tensor]) -> None:
    check_marks({}, slots=slots)


_reset_slots = register_kernel(
    "ring.reset_slots",
    launch.explain_slots,
    launch.reset_slots,
    cpu.reset_slots,
    _check_reset_slots,
)
