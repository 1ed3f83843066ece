"""What concerns whole slots: which requests fold, moving cursors, copying and clearing slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridspec.ops._backends import choose_backend
from hybridspec.ops._checks import check_option
from hybridspec.ops._folds import first_fold_length
from hybridspec.ops._library import register
from hybridspec.ops._requests import check_slots
from hybridspec.ops._triton_support import triton_or_reference
from hybridspec.ops.gated_delta_rule import launch_slots
from hybridspec.ops.gated_delta_rule.contracts import check_capacity, check_cursors, check_marks

__all__ = ["commit", "copy_slots", "decide_folds", "reset_slots"]

_cursor_backends = triton_or_reference(launch_slots.explain_cursors)
_slot_backends = triton_or_reference(launch_slots.explain_slots)


def decide_folds(
    history_len: Tensor,
    slots: Tensor,
    num_verify_tokens: Tensor,
    is_fold: Tensor,
    *,
    max_window: int,
    ring_start: Tensor | None = None,
) -> None:
    """Mark the requests whose rows would not fit behind their live windows; nothing else changes.

    is_fold = slot >= 0 and num_verify_tokens > 0 and (history_len + num_verify_tokens > max_window
              or ring_start == 0 and history_len >= W - floor(W frac(633 slot / 1024)))

    The second condition holds only where `ring_start` is given. It folds a request's first window
    early, which staggers the folds of requests that were admitted together; a window that begins at
    row 0 again later is treated in the same way.

    Args:
        history_len: live rows of each slot, [S], int32; contiguous; in.
        slots: slot of each request, -1 = padding, [B], int32; contiguous; in.
        num_verify_tokens: rows of each request in this step, [B], int32; contiguous; in.
        is_fold: the marks, [B], int8; out.
        max_window: most live rows (W).
        ring_start: first live ring row of each slot, [S], int32; None: full windows only; in.

    Raises:
        TypeError: for a wrong dtype.
        ValueError: for a wrong shape, stride or window.

    Numerics:
        Integers only.

    Source:
        README.md of this package.
    """
    cursors = {"history_len": history_len}
    if ring_start is not None:
        cursors["ring_start"] = ring_start
    check_cursors({}, **cursors)
    check_marks({}, slots=slots, num_verify_tokens=num_verify_tokens, is_fold=is_fold)
    check_option("max_window", max_window, int, low=1)
    _decide_folds_op(history_len, ring_start, slots, num_verify_tokens, is_fold, max_window)


def commit(
    seq_len: Tensor,
    ring_start: Tensor,
    history_len: Tensor,
    slots: Tensor,
    is_fold: Tensor,
    num_verify_tokens: Tensor,
    num_committed: Tensor,
    *,
    ring_capacity: int,
    backend: str = "auto",
) -> None:
    """Move the cursors of a step over its committed rows; a second call changes nothing.

    With n = num_committed cut to 0..num_verify_tokens: seq_len += n. Where the step folded,
    ring_start += history_len (mod R) and history_len = n; elsewhere history_len += n. Then
    is_fold and num_verify_tokens become 0.

    Args:
        seq_len: positions in the logs of each slot, [S], int32; contiguous; in-out.
        ring_start: first live ring row of each slot, [S], int32; contiguous; in-out.
        history_len: live ring rows of each slot, [S], int32; contiguous; in-out.
        slots: slot of each request, -1 = padding, no slot twice, [B], int32; contiguous; in.
        is_fold: the marks that this step's verify or fold got, [B], int8; in-out.
        num_verify_tokens: rows of each request in this step, [B], int32; contiguous; in-out.
        num_committed: rows to keep, [B], int32; ignored in padding; in.
        ring_capacity: ring rows (R).
        backend: "auto", "triton" or "reference".

    Raises:
        TypeError: for a wrong dtype.
        UnsupportedError: if the backend asked for cannot serve the call; the message says why.
        ValueError: for a wrong shape, stride, capacity or backend.

    Numerics:
        Integers only.

    Source:
        README.md of this package.
    """
    check_cursors({}, seq_len=seq_len, ring_start=ring_start, history_len=history_len)
    check_marks(
        {},
        slots=slots,
        is_fold=is_fold,
        num_verify_tokens=num_verify_tokens,
        num_committed=num_committed,
    )
    check_capacity(ring_capacity)
    _commit_op(
        seq_len, ring_start, history_len, slots, is_fold, num_verify_tokens, num_committed,
        ring_capacity, backend,
    )  # fmt: skip


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


def _choose(name: str, backend: str, *arguments: Tensor) -> str:
    return choose_backend(
        f"gated_delta_rule.{name}", backend, _cursor_backends(arguments[0]), *arguments
    )


def _decide_folds(
    history_len: Tensor,
    ring_start: Tensor | None,
    slots: Tensor,
    num_verify_tokens: Tensor,
    is_fold: Tensor,
    max_window: int,
) -> None:
    cursors = (history_len,) if ring_start is None else (history_len, ring_start)
    if _choose("decide_folds", "auto", *cursors, slots, num_verify_tokens, is_fold) == "triton":
        launch_slots.decide_folds(
            history_len, ring_start, slots, num_verify_tokens, is_fold, max_window
        )
        return
    history, numbers = history_len.tolist(), slots.tolist()
    starts = [-1] * len(history) if ring_start is None else ring_start.tolist()
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
    is_fold.copy_(torch.tensor(marks, dtype=torch.int8))


def _commit(
    seq_len: Tensor,
    ring_start: Tensor,
    history_len: Tensor,
    slots: Tensor,
    is_fold: Tensor,
    num_verify_tokens: Tensor,
    num_committed: Tensor,
    ring_capacity: int,
    backend: str,
) -> None:
    arguments = (
        seq_len, ring_start, history_len, slots, is_fold, num_verify_tokens, num_committed
    )  # fmt: skip
    if _choose("commit", backend, *arguments) == "triton":
        launch_slots.commit(*arguments, ring_capacity)
        return
    positions, starts, lengths = seq_len.tolist(), ring_start.tolist(), history_len.tolist()
    check_slots("slots", slots.tolist(), len(positions))
    marks = (slots, is_fold, num_verify_tokens, num_committed)
    for slot, fold, size, asked in zip(*(mark.tolist() for mark in marks), strict=True):
        if slot < 0:
            continue
        n = max(0, min(asked, size))
        folded = lengths[slot] if fold else 0
        seq_len[slot] = positions[slot] + n
        ring_start[slot] = (starts[slot] + folded) % ring_capacity
        history_len[slot] = lengths[slot] - folded + n
    is_fold.zero_()
    num_verify_tokens.zero_()


def _copy_slots(pools: list[Tensor], src_slots: Tensor, dst_slots: Tensor) -> None:
    name = "gated_delta_rule.copy_slots"
    if choose_backend(name, "auto", _slot_backends(src_slots), src_slots, pools) == "triton":
        launch_slots.copy_slots(pools, src_slots, dst_slots)
        return
    for argument, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        if pools:
            check_slots(argument, slots.tolist(), pools[0].shape[0])
    is_live = (src_slots >= 0) & (dst_slots >= 0)
    source, target = src_slots[is_live].long(), dst_slots[is_live].long()
    for pool in pools:
        pool.index_copy_(0, target, pool.index_select(0, source))


def _reset_slots(pools: list[Tensor], slots: Tensor) -> None:
    name = "gated_delta_rule.reset_slots"
    if choose_backend(name, "auto", _slot_backends(slots), slots, pools) == "triton":
        launch_slots.reset_slots(pools, slots)
        return
    if pools:
        check_slots("slots", slots.tolist(), pools[0].shape[0])
    index = slots[slots >= 0].long()
    for pool in pools:
        pool.index_fill_(0, index, 0)


_decide_folds_op = register(
    "gated_delta_rule_decide_folds(Tensor history_len, Tensor? ring_start, Tensor slots, "
    "Tensor num_verify_tokens, Tensor(a!) is_fold, int max_window)",
    _decide_folds,
)
_commit_op = register(
    "gated_delta_rule_commit(Tensor(a!) seq_len, Tensor(b!) ring_start, Tensor(c!) history_len, "
    "Tensor slots, Tensor(d!) is_fold, Tensor(e!) num_verify_tokens, Tensor num_committed, "
    "int ring_capacity, str backend)",
    _commit,
)
_copy_slots_op = register(
    "gated_delta_rule_copy_slots(Tensor(a!)[] pools, Tensor src_slots, Tensor dst_slots)",
    _copy_slots,
)
_reset_slots_op = register(
    "gated_delta_rule_reset_slots(Tensor(a!)[] pools, Tensor slots)", _reset_slots
)
