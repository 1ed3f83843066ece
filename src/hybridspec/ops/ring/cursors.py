"""The decision to fold, and everything that moves a cursor."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._checks import check_option
from hybridspec.ops._library import register_kernel
from hybridspec.ops.ring import cpu, launch
from hybridspec.ops.ring.contracts import (
    check_capacity,
    check_cursors,
    check_marks,
    check_threshold,
)
from hybridspec.ops.ring.view import Marks, Windows

__all__ = ["advance", "commit", "decide_folds", "restart_windows"]


def decide_folds(
    history_len: Tensor, slots: Tensor, num_verify_tokens: Tensor, is_fold: Tensor, *,
    max_window: int, ring_start: Tensor | None = None,
) -> None:  # fmt: skip
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
    _decide_folds(Windows(ring_start, history_len), slots, num_verify_tokens, is_fold, max_window)


def commit(
    seq_len: Tensor, ring_start: Tensor, history_len: Tensor, slots: Tensor, is_fold: Tensor,
    num_verify_tokens: Tensor, num_committed: Tensor, *,
    ring_capacity: int, backend: str = "auto",
) -> None:  # fmt: skip
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
        UnsupportedError: if the requested backend does not support the call; the message says why.
        ValueError: for a wrong shape, stride, capacity or backend.

    Numerics:
        Integers only.

    Source:
        README.md of this package.
    """
    _commit(
        seq_len,
        Windows(ring_start, history_len),
        Marks(slots, is_fold, num_verify_tokens),
        num_committed,
        ring_capacity,
        backend=backend,
    )


def restart_windows(
    ring_start: Tensor, history_len: Tensor, slots: Tensor | None = None, *,
    fold_threshold: int, ring_capacity: int,
) -> None:  # fmt: skip
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
    _restart_windows(Windows(ring_start, history_len), slots, fold_threshold, ring_capacity)


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


def _check_decide_folds(
    windows: Windows, slots: Tensor, num_verify_tokens: Tensor, is_fold: Tensor, max_window: int
) -> None:
    check_cursors({}, history_len=windows.history_len)
    if windows.ring_start is not None:
        check_cursors({}, history_len=windows.history_len, ring_start=windows.ring_start)
    check_marks({}, slots=slots, num_verify_tokens=num_verify_tokens, is_fold=is_fold)
    check_option("max_window", max_window, int, low=1)


_decide_folds = register_kernel(
    "ring.decide_folds",
    launch.explain_cursors,
    launch.decide_folds,
    cpu.decide_folds,
    _check_decide_folds,
)


def _check_commit(
    seq_len: Tensor, windows: Windows, marks: Marks, num_committed: Tensor, ring_capacity: int
) -> None:
    check_cursors({}, seq_len=seq_len, **windows._asdict())
    check_marks({}, **marks._asdict(), num_committed=num_committed)
    check_capacity(ring_capacity)


_commit = register_kernel(
    "ring.commit", launch.explain_cursors, launch.commit, cpu.commit, _check_commit
)


def _check_restart_windows(
    windows: Windows, slots: Tensor | None, fold_threshold: int, ring_capacity: int
) -> None:
    check_marks({}, **windows._asdict(), **({} if slots is None else {"slots": slots}))
    check_threshold(fold_threshold)
    check_capacity(ring_capacity)


_restart_windows = register_kernel(
    "ring.restart_windows",
    launch.explain_cursors,
    launch.restart_windows,
    cpu.restart_windows,
    _check_restart_windows,
)
