"""Kernels on cursors and slots against the reference, interpreted."""

from __future__ import annotations

import pytest
import torch

from helpers.gdn_cases import Pools
from helpers.ring_cases import compare_backends, kernel_pools
from hybridspec.ops import ring as ring_ops
from hybridspec.ops.ring import launch
from hybridspec.ops.ring.view import Windows

pytestmark = pytest.mark.interpreted


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_commit() -> None:
    marks = torch.tensor([1, 0, 1, 0, 1], dtype=torch.int8)
    arguments = (int32(3, 1, -1, 0, 2), marks, int32(4, 3, 2, 8, 0), int32(3, -1, 2, 99, 5))

    def run(pools: Pools, backend: str) -> None:
        slots, is_fold, rows, committed = (part.clone() for part in arguments)
        ring = pools.ring
        for _ in range(2):
            ring_ops.commit(
                pools.seq_len, ring.ring_start, ring.history_len, slots, is_fold, rows, committed,
                ring_capacity=32, backend=backend,
            )  # fmt: skip
        assert not is_fold.any() and not rows.any()

    compare_backends(run)


def test_decide_folds() -> None:
    pools = kernel_pools()
    slots, rows = int32(3, 1, -1, 0, 2, 1), int32(4, 1, 8, 8, 16, 0)
    found = torch.full((6,), 9, dtype=torch.int8)
    launch.decide_folds(Windows(None, pools.ring.history_len), slots, rows, found, 16)
    assert found.tolist() == [0, 1, 0, 0, 1, 0]
    launch.decide_folds(Windows(None, pools.ring.history_len), slots, rows, found, 5)
    assert found.tolist() == [1, 1, 0, 1, 1, 0]


@pytest.mark.parametrize("max_window", [8, 12, 16])
def test_decide_folds_of_first_windows(max_window: int) -> None:
    lengths = torch.arange(max_window + 1, dtype=torch.int32).repeat(40)
    starts = (torch.arange(len(lengths)) % 7 < 2).to(torch.int32)
    slots = torch.arange(len(lengths), dtype=torch.int32).flip(0)
    slots[::11] = -1
    rows = torch.arange(len(lengths), dtype=torch.int32) % 5
    expected, found = (torch.full((len(lengths),), 9, dtype=torch.int8) for _ in range(2))
    ring_ops.decide_folds(lengths, slots, rows, expected, max_window=max_window, ring_start=starts)
    launch.decide_folds(Windows(starts, lengths), slots, rows, found, max_window)
    assert torch.equal(found, expected)


def test_copy_and_reset() -> None:
    def run(pools: Pools, backend: str) -> None:
        tensors = pools.tensors()
        copied, written = int32(3, 0, -1, 1), int32(0, 5, 2, -1)
        if backend == "triton":
            launch.copy_slots(copied, written, tensors)
            launch.reset_slots(int32(1, -1), tensors)
        else:
            ring_ops.copy_slots(tensors, copied, written)
            ring_ops.reset_slots(tensors, int32(1, -1))

    compare_backends(run)


@pytest.mark.parametrize("has_slots", [False, True])
def test_restart_windows(has_slots: bool) -> None:
    slots = torch.tensor([3, -1, 0, 2, 1], dtype=torch.int32) if has_slots else None
    found = []
    for run in (launch.restart_windows, None):
        start = torch.tensor([30, 30, 9, 31, 0], dtype=torch.int32)
        length = torch.tensor([13, 13, 12, 16, 0], dtype=torch.int32)
        if run is None:
            ring_ops.restart_windows(start, length, slots, fold_threshold=13, ring_capacity=32)
        else:
            run(Windows(start, length), slots, 13, 32)
        found.append((start.tolist(), length.tolist()))
    kept = (30, 13) if has_slots else (11, 0)
    assert found[0] == found[1] == ([11, kept[0], 9, 15, 0], [0, kept[1], 12, 0, 0])
