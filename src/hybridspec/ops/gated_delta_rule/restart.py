"""Commit of folds for callers that key cursors by batch row and add accepted rows themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._backends import choose_backend
from hybridspec.ops._library import register
from hybridspec.ops._triton_support import triton_or_reference
from hybridspec.ops.gated_delta_rule import launch_slots
from hybridspec.ops.gated_delta_rule.contracts import check_capacity, check_marks, check_threshold

__all__ = ["restart_windows"]

_backends = triton_or_reference(launch_slots.explain_cursors)


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


def _restart_windows(
    ring_start: Tensor,
    history_len: Tensor,
    slots: Tensor | None,
    fold_threshold: int,
    ring_capacity: int,
) -> None:
    name, candidates = "gated_delta_rule.restart_windows", _backends(history_len)
    if choose_backend(name, "auto", candidates, history_len, ring_start) == "triton":
        launch_slots.restart_windows(ring_start, history_len, slots, fold_threshold, ring_capacity)
        return
    is_fold = history_len >= fold_threshold
    if slots is not None:
        is_fold &= slots >= 0
    moved = (ring_start + history_len) & (ring_capacity - 1)
    ring_start.copy_(torch.where(is_fold, moved, ring_start))
    history_len.masked_fill_(is_fold, 0)


_restart_windows_op = register(
    "gated_delta_rule_restart_windows(Tensor(a!) ring_start, Tensor(b!) history_len, "
    "Tensor? slots, int fold_threshold, int ring_capacity)",
    _restart_windows,
)
