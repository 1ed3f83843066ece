"""Whole slots: copying them in every pool of a layer or a model, and clearing them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybridspec.ops._backends import choose_backend
from hybridspec.ops._library import register
from hybridspec.ops._requests import check_slots
from hybridspec.ops._triton_support import triton_or_reference
from hybridspec.ops.ring import launch
from hybridspec.ops.ring.contracts import check_marks

__all__ = ["copy_slots", "reset_slots"]

_backends = triton_or_reference(launch.explain_slots)


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
    check_marks({}, src_slots=src_slots, dst_slots=dst_slots)
    _copy_slots_op(_checked_pools(pools), src_slots, dst_slots)


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
    check_marks({}, slots=slots)
    _reset_slots_op(_checked_pools(pools), slots)


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


def _copy_slots(pools: list[Tensor], src_slots: Tensor, dst_slots: Tensor) -> None:
    name = "ring.copy_slots"
    if choose_backend(name, "auto", _backends(src_slots), src_slots, pools) == "triton":
        launch.copy_slots(pools, src_slots, dst_slots)
        return
    for argument, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        if pools:
            check_slots(argument, slots.tolist(), pools[0].shape[0])
    is_live = (src_slots >= 0) & (dst_slots >= 0)
    source, target = src_slots[is_live].long(), dst_slots[is_live].long()
    for pool in pools:
        pool.index_copy_(0, target, pool.index_select(0, source))


def _reset_slots(pools: list[Tensor], slots: Tensor) -> None:
    name = "ring.reset_slots"
    if choose_backend(name, "auto", _backends(slots), slots, pools) == "triton":
        launch.reset_slots(pools, slots)
        return
    if pools:
        check_slots("slots", slots.tolist(), pools[0].shape[0])
    index = slots[slots >= 0].long()
    for pool in pools:
        pool.index_fill_(0, index, 0)


_copy_slots_op = register(
    "ring_copy_slots(Tensor(a!)[] pools, Tensor src_slots, Tensor dst_slots)",
    _copy_slots,
)
_reset_slots_op = register("ring_reset_slots(Tensor(a!)[] pools, Tensor slots)", _reset_slots)
