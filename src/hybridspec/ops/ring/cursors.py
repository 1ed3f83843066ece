"""The decision to fold, and everything that moves a cursor."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._backends import choose_backend
from hybridspec.ops._checks import check_option
from hybridspec.ops._library import register
from hybridspec.ops._requests import check_slots
from hybridspec.ops._triton_support import triton_or_reference
from hybridspec.ops.ring import launch
from hybridspec.ops.ring.contracts import (
    check_capacity,
    check_cursors,
    check_marks,
    check_threshold,
)
from hybridspec.ops.ring.fold_rule import first_fold_length

__all__ = ["advance", "commit", "decide_folds", "restart_windows"]

_backends = triton_or_reference(launch.explain_cursors)


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


def restart_windows(
    ring_start: Tensor,
    history_len: Tensor,
    slots: Tensor | None = None,
    *,
    fold_threshold: int,
    ring_capacity: int,
) -> None:
    """Move the cursors of the requests that `verify_rows` folded behind their windows, in place.

    ring_start <- (ring_start + history_len) mod R and history_len <- 0, where
    history_len >= fold_threshold and the request has a slot

    Args:
        ring_start: first live ring row of each request, [B], int32; in-out.
        history_len: live ring rows of each request, [B], int32; in-out.
        slots: slot of each request, negative = padding, [B], int32; None: all have one; in.
        fold_threshold: as `verify_rows` got it.
        ring_capacity: ring rows (R), a power of two.

    Raises:
        TypeError: for a wrong dtype.
        ValueError: for a wrong shape, stride or capacity.

    Numerics:
        Integers only.

    Source:
        README.md of this package.
    """
    marks = {"ring_start": ring_start, "history_len": history_len}
    check_marks({}, **marks, **({} if slots is None else {"slots": slots}))
    check_threshold(fold_threshold)
    check_capacity(ring_capacity)
    _restart_windows_op(ring_start, history_len, slots, fold_threshold, ring_capacity)


def advance(seq_len: Tensor, slots: Tensor, num_rows: Tensor) -> None:
    """Move the cursor of the logs over the rows that a prefill stored; all of them stay.

    seq_len[slots[i]] += num_rows[i]

    Args:
        seq_len: positions in the logs of each slot, [S], int32; contiguous; in-out.
        slots: slot of each request, -1 = padding, [B], int32; contiguous; in.
        num_rows: rows that were stored, [B], int32; ignored in padding; contiguous; in.

    Raises:
        TypeError: for a wrong dtype.
        ValueError: for a wrong shape or stride.

    Numerics:
        Integers only; no host sync.

    Source:
        README.md of this package.
    """
    check_cursors({}, seq_len=seq_len)
    check_marks({}, slots=slots, num_rows=num_rows)
    stored = torch.where(slots >= 0, num_rows, 0)
    seq_len.index_add_(0, slots.clamp(min=0).long(), stored)


def _choose(name: str, backend: str, *arguments: Tensor) -> str:
    return choose_backend(f"ring.{name}", backend, _backends(arguments[0]), *arguments)


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
        launch.decide_folds(history_len, ring_start, slots, num_verify_tokens, is_fold, max_window)
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
        launch.commit(*arguments, ring_capacity)
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


def _restart_windows(
    ring_start: Tensor,
    history_len: Tensor,
    slots: Tensor | None,
    fold_threshold: int,
    ring_capacity: int,
) -> None:
    name, candidates = "ring.restart_windows", _backends(history_len)
    if choose_backend(name, "auto", candidates, history_len, ring_start) == "triton":
        launch.restart_windows(ring_start, history_len, slots, fold_threshold, ring_capacity)
        return
    is_fold = history_len >= fold_threshold
    if slots is not None:
        is_fold &= slots >= 0
    moved = (ring_start + history_len) & (ring_capacity - 1)
    ring_start.copy_(torch.where(is_fold, moved, ring_start))
    history_len.masked_fill_(is_fold, 0)


_decide_folds_op = register(
    "ring_decide_folds(Tensor history_len, Tensor? ring_start, Tensor slots, "
    "Tensor num_verify_tokens, Tensor(a!) is_fold, int max_window)",
    _decide_folds,
)
_commit_op = register(
    "ring_commit(Tensor(a!) seq_len, Tensor(b!) ring_start, Tensor(c!) history_len, "
    "Tensor slots, Tensor(d!) is_fold, Tensor(e!) num_verify_tokens, Tensor num_committed, "
    "int ring_capacity, str backend)",
    _commit,
)
_restart_windows_op = register(
    "ring_restart_windows(Tensor(a!) ring_start, Tensor(b!) history_len, "
    "Tensor? slots, int fold_threshold, int ring_capacity)",
    _restart_windows,
)
