"""Moving cursors, copying and clearing slots, in PyTorch operators."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._library import Lasting, Written
from hybridspec.ops._requests import check_slots, write_numbers
from hybridspec.ops.ring.fold_rule import first_fold_length
from hybridspec.ops.ring.view import Marks, Windows

__all__ = ["commit", "copy_slots", "decide_folds", "reset_slots", "restart_windows"]


def decide_folds(
    windows: Windows,
    slots: Tensor,
    num_verify_tokens: Tensor,
    is_fold: Written[Tensor],
    max_window: int,
) -> None:
    """Mark requests; see `cursors.decide_folds`."""
    history, numbers = windows.history_len.tolist(), slots.tolist()
    starts = [-1] * len(history) if windows.ring_start is None else windows.ring_start.tolist()
    check_slots("slots", numbers, len(history))
    marks = [
        slot >= 0
        and n > 0
        and (
            history[slot] + n > max_window
            or (starts[slot] == 0 and history[slot] >= first_fold_length(slot, max_window))
        )
        for slot, n in zip(numbers, num_verify_tokens.tolist(), strict=True)
    ]
    write_numbers(is_fold, marks)


def commit(
    seq_len: Lasting[Written[Tensor]],
    windows: Lasting[Written[Windows]],
    marks: Lasting[Written[Marks]],
    num_committed: Tensor,
    ring_capacity: int,
) -> None:
    """Move cursors over committed rows; see `cursors.commit`."""
    ring_start, history_len = windows
    assert ring_start is not None
    positions, starts, lengths = seq_len.tolist(), ring_start.tolist(), history_len.tolist()
    columns = [column.tolist() for column in (*marks, num_committed)]
    check_slots("slots", columns[0], len(positions))
    for slot, fold, size, asked in zip(*columns, strict=True):
        if slot < 0:
            continue
        n = max(0, min(asked, size))
        folded = lengths[slot] if fold else 0
        seq_len[slot] = positions[slot] + n
        ring_start[slot] = (starts[slot] + folded) % ring_capacity
        history_len[slot] = lengths[slot] - folded + n
    marks.is_fold.zero_()
    marks.num_verify_tokens.zero_()


def restart_windows(
    windows: Written[Windows], slots: Tensor | None, fold_threshold: int, ring_capacity: int
) -> None:
    """Move cursors behind folded windows; see `cursors.restart_windows`."""
    ring_start, history_len = windows
    assert ring_start is not None
    is_fold = history_len >= fold_threshold
    if slots is not None:
        is_fold &= slots >= 0
    moved = (ring_start + history_len) & (ring_capacity - 1)
    ring_start.copy_(torch.where(is_fold, moved, ring_start))
    history_len.masked_fill_(is_fold, 0)


def copy_slots(src_slots: Tensor, dst_slots: Tensor, pools: Written[list[Tensor]]) -> None:
    """Copy slots; see `copies.copy_slots`."""
    for argument, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        if pools:
            check_slots(argument, slots.tolist(), pools[0].shape[0])
    is_live = (src_slots >= 0) & (dst_slots >= 0)
    source, target = src_slots[is_live].long(), dst_slots[is_live].long()
    for pool in pools:
        pool.index_copy_(0, target, pool.index_select(0, source))


def reset_slots(slots: Tensor, pools: Written[list[Tensor]]) -> None:
    """Clear slots; see `copies.reset_slots`."""
    if pools:
        check_slots("slots", slots.tolist(), pools[0].shape[0])
    index = slots[slots >= 0].long()
    for pool in pools:
        pool.index_fill_(0, index, 0)
