"""Cursors and slots: which requests fold, commit, and copying or clearing slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._backends import always, choose_backend
from .._checks import Dims, check, check_dtype
from .._library import register

__all__ = ["commit", "copy_slots", "decide_folds", "reset_slots"]

_CANDIDATES = {"reference": always}


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
    choose_backend("commit", backend, _CANDIDATES)
    is_live = slots >= 0
    index = slots[is_live].long()
    committed = torch.minimum(num_committed.clamp_min(0), num_verify_tokens)[is_live].int()
    history = history_len[index]
    folded = torch.where(is_fold[is_live] != 0, history, 0)
    seq_len[index] += committed.to(seq_len.dtype)
    ring_start[index] = (ring_start[index] + folded) % ring_capacity
    history_len[index] = history - folded + committed
    is_fold.zero_()
    num_verify_tokens.zero_()


def _decide_folds(
    history_len: Tensor, slots: Tensor, num_verify_tokens: Tensor, is_fold: Tensor, max_window: int
) -> None:
    history = history_len[slots.clamp_min(0).long()]
    is_over = (history + num_verify_tokens > max_window) & (num_verify_tokens > 0) & (slots >= 0)
    is_fold.copy_(is_over)


def _copy_slots(pools: list[Tensor], src_slots: Tensor, dst_slots: Tensor) -> None:
    is_live = (src_slots >= 0) & (dst_slots >= 0)
    source, target = src_slots[is_live].long(), dst_slots[is_live].long()
    for pool in pools:
        pool[target] = pool[source]


def _reset_slots(pools: list[Tensor], slots: Tensor) -> None:
    index = slots[slots >= 0].long()
    for pool in pools:
        pool.index_fill_(0, index, 0)


_commit_op = register(
    "gated_delta_rule_commit(Tensor(a!) seq_len, Tensor(b!) ring_start, Tensor(c!) history_len, "
    "Tensor slots, Tensor(d!) is_fold, Tensor(e!) num_verify_tokens, Tensor num_committed, "
    "int ring_capacity, str backend)",
    _commit,
)
_decide_folds_op = register(
    "gated_delta_rule_decide_folds(Tensor history_len, Tensor slots, Tensor num_verify_tokens, "
    "Tensor(a!) is_fold, int max_window)",
    _decide_folds,
)
_copy_slots_op = register(
    "copy_slots(Tensor(a!)[] pools, Tensor src_slots, Tensor dst_slots)", _copy_slots
)
_reset_slots_op = register("reset_slots(Tensor(a!)[] pools, Tensor slots)", _reset_slots)


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
    """Move the cursors of a step over its committed rows; a second call changes nothing."""
    dims: Dims = {}
    check("slots", slots, "B", dims)
    check("is_fold", is_fold, "B", dims)
    check("num_verify_tokens", num_verify_tokens, "B", dims)
    check("num_committed", num_committed, "B", dims)
    check("seq_len", seq_len, "S", dims)
    check("ring_start", ring_start, "S", dims)
    check("history_len", history_len, "S", dims)
    _commit_op(
        seq_len,
        ring_start,
        history_len,
        slots,
        is_fold,
        num_verify_tokens,
        num_committed,
        ring_capacity,
        backend,
    )


def decide_folds(
    history_len: Tensor,
    slots: Tensor,
    num_verify_tokens: Tensor,
    is_fold: Tensor,
    *,
    max_window: int,
) -> None:
    """Mark the requests whose rows would not fit behind their live windows."""
    dims: Dims = {}
    check("slots", slots, "B", dims)
    check("num_verify_tokens", num_verify_tokens, "B", dims)
    check("is_fold", is_fold, "B", dims)
    check_dtype("is_fold", is_fold, torch.int8)
    _decide_folds_op(history_len, slots, num_verify_tokens, is_fold, max_window)


def copy_slots(pools: Sequence[Tensor], src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy slots of every pool (dim 0 is the slot); pairs with a -1 are skipped."""
    _copy_slots_op(list(pools), src_slots, dst_slots)


def reset_slots(pools: Sequence[Tensor], slots: Tensor) -> None:
    """Zero slots of every pool (dim 0 is the slot); -1 is skipped."""
    _reset_slots_op(list(pools), slots)
