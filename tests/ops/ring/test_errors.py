"""Wrong calls of what moves cursors, copies slots or clears them."""

from __future__ import annotations

import pytest
import torch

from hybridspec.ops import ring as ring_ops


def test_wrong_arguments_of_commit_and_decide_folds() -> None:
    names = ("seq_len", "ring_start", "history_len")
    per_slot = {name: torch.zeros(7, dtype=torch.int32) for name in names}
    names = ("slots", "num_verify_tokens", "num_committed")
    per_request = {name: torch.zeros(2, dtype=torch.int32) for name in names}
    per_request["is_fold"] = torch.zeros(2, dtype=torch.int8)

    def commit(**wrong: object) -> None:
        ring_ops.commit(
            **{**per_slot, **per_request, "ring_capacity": 32, **wrong},
        )

    commit()
    for name in per_slot:
        with pytest.raises(TypeError, match=f"{name}: expected dtype int32, got int64"):
            commit(**{name: per_slot[name].long()})
    with pytest.raises(ValueError, match=r"history_len: expected shape \[S\] = \[7\], got \[6\]"):
        commit(history_len=per_slot["history_len"][:6])
    for name in per_request:
        with pytest.raises(ValueError, match=rf"{name}: expected shape .*, got \[2, 1\]"):
            commit(**{name: per_request[name][:, None]})
        with pytest.raises(TypeError, match=f"{name}: expected dtype int.*, got float32"):
            commit(**{name: per_request[name].float()})
    with pytest.raises(ValueError, match="ring_capacity: expected a power of two, got 24"):
        commit(ring_capacity=24)
    with pytest.raises(TypeError, match="ring_capacity: expected an integer, got '32'"):
        commit(ring_capacity="32")
    with pytest.raises(ValueError, match="history_len: expected a last stride of 1"):
        commit(history_len=torch.zeros(14, dtype=torch.int32)[::2])
    with pytest.raises(ValueError, match="backend: expected one of"):
        commit(backend="none")

    step = {name: per_request[name] for name in ("slots", "num_verify_tokens", "is_fold")}
    with pytest.raises(TypeError, match="history_len: expected dtype int32, got float32"):
        ring_ops.decide_folds(per_slot["seq_len"].float(), **step, max_window=16)
    with pytest.raises(TypeError, match="ring_start: expected dtype int32, got float32"):
        ring_ops.decide_folds(
            per_slot["seq_len"], **step, max_window=16, ring_start=per_slot["seq_len"].float()
        )
    for wrong, kind, text in (
        (0, ValueError, "max_window: expected at least 1, got 0"),
        (None, TypeError, "max_window: expected an integer, got None"),
    ):
        with pytest.raises(kind, match=text):
            ring_ops.decide_folds(per_slot["seq_len"], **step, max_window=wrong)
    with pytest.raises(TypeError, match="is_fold: expected dtype int8, got bool"):
        ring_ops.decide_folds(
            per_slot["seq_len"], **(step | {"is_fold": step["is_fold"].bool()}), max_window=16
        )


def test_wrong_arguments_of_restart_windows() -> None:
    start, length = torch.zeros(3, dtype=torch.int32), torch.full((3,), 14, dtype=torch.int32)
    right = {"fold_threshold": 13, "ring_capacity": 32}
    for wrong, kind, text in (
        ({"ring_capacity": 31}, ValueError, "ring_capacity: expected a power of two, got 31"),
        ({"ring_capacity": "32"}, TypeError, "ring_capacity: expected an integer, got '32'"),
        ({"fold_threshold": None}, TypeError, "fold_threshold: expected an integer, got None"),
        ({"fold_threshold": 2**31}, ValueError, "fold_threshold: expected at most 2147483647"),
        ({"slots": torch.zeros(6).int()[::2]}, ValueError, "slots: expected a last stride of 1"),
    ):
        with pytest.raises(kind, match=text):
            ring_ops.restart_windows(start, length, **(right | wrong))
    assert length.tolist() == [14, 14, 14]
    ring_ops.restart_windows(start, length, **right)
    assert (start.tolist(), length.tolist()) == ([14] * 3, [0] * 3)


def test_wrong_pools_and_slots() -> None:
    pools = [torch.zeros(7, 3), torch.zeros(6)]
    slots = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"pools\[1\]: expected 7 slots like pools\[0\], got shape"
    ):
        ring_ops.copy_slots(pools, slots, slots)
    with pytest.raises(
        ValueError, match=r"pools\[1\]: expected 7 slots like pools\[0\], got shape"
    ):
        ring_ops.reset_slots(pools, slots)
    with pytest.raises(ValueError, match=r"dst_slots: expected shape \[B\] = \[2\], got \[1\]"):
        ring_ops.copy_slots(pools[:1], slots, slots[:1])
    with pytest.raises(TypeError, match="slots: expected dtype int32, got int64"):
        ring_ops.reset_slots(pools[:1], slots.long())


def test_wrong_arguments_of_advance() -> None:
    seq_len, slots = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"num_rows: expected shape \[B\] = \[2\], got \[1\]"):
        ring_ops.advance(seq_len, slots, slots[:1])
    with pytest.raises(TypeError, match="seq_len: expected dtype int32, got int64"):
        ring_ops.advance(seq_len.long(), slots, slots)
