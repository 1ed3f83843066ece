"""Whole slots: copying and clearing them, in pools that may be strided."""

from __future__ import annotations

import torch

from helpers.gdn_cases import Geometry, assert_same_bits
from helpers.gdn_sessions import Session
from helpers.ring_cases import filled_pools
from hybridspec.ops.ring import copy_slots, reset_slots


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_copied_slots_decode_like_their_source() -> None:
    """Cursors travel with the slot: the copy folds and wraps where the source does."""
    session = Session(Geometry(), num_requests=3, starts=[26, 9, 0], bound=1e-10)
    for _ in range(3):
        session.step({0: 4, 1: 2}, {0: 3, 1: 1})
    session.step({2: 7}, {2: 7})
    copy_slots(session.pools.tensors(), ints(0, -1, 1), ints(2, 1, -1))
    session.states[2] = session.states[0]
    assert int(session.pools.seq_len[2]) == int(session.pools.seq_len[0]) == 9
    for step in range(8):
        session.step({2: 4, 0: 3, 1: 1}, {2: step % 5, 0: 2, 1: 1})
        session.check_states()
    assert session.coverage["fold"] > 1


def test_slots_can_be_swapped() -> None:
    pools = filled_pools(is_strided=True)
    before = pools.copies()
    copy_slots(pools.tensors(), ints(2, 4, 3), ints(4, 2, 3))
    for actual, old in zip(pools.tensors(), before, strict=True):
        assert_same_bits(actual, old[[0, 1, 4, 3, 2, 5, 6]])


def test_reset_zeroes_the_slots_named() -> None:
    pools = filled_pools(is_strided=True)
    before = pools.copies()
    reset_slots(pools.tensors(), ints(3, -1, 6))
    for actual, old in zip(pools.tensors(), before, strict=True):
        assert_same_bits(actual[[3, 6]], torch.zeros_like(old[[3, 6]]))
        assert_same_bits(actual[[0, 1, 2, 4, 5]], old[[0, 1, 2, 4, 5]])


def test_nothing_to_do() -> None:
    pools = filled_pools()
    before = pools.copies()
    copy_slots(pools.tensors(), ints(), ints())
    reset_slots(pools.tensors(), ints(-1))
    reset_slots([], ints(2))
    for actual, old in zip(pools.tensors(), before, strict=True):
        assert_same_bits(actual, old)
