"""Cursors and whole slots: deciding, committing, folding, materializing, copying, clearing."""

from __future__ import annotations

import pytest
import torch

from helpers.gdn_cases import Dtypes, Geometry, Pools, assert_same_bits
from helpers.gdn_oracle import window_state
from helpers.gdn_sessions import Session
from helpers.tolerances import assert_close
from hybridspec.ops.gated_delta_rule import (
    commit,
    copy_slots,
    decide_folds,
    fold,
    materialize,
    reset_slots,
)

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
DTYPES = [Dtypes(), Dtypes(F32, F32, BF16), Dtypes(BF16, BF16, BF16), Dtypes(F16, F16, F32)]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def marks(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int8)


def filled_pools(dtypes: Dtypes | None = None, *, is_strided: bool = False) -> Pools:
    """Return pools whose slots 0..5 have windows of 0, 1, 5, 16, 7 (wrapped), 16 (wrapped) rows."""
    pools = Pools.create(Geometry(), dtypes or Dtypes(), is_strided=is_strided)
    generator = torch.Generator().manual_seed(3)
    for slot, (start, history) in enumerate([(0, 0), (31, 1), (8, 5), (16, 16), (28, 7), (20, 16)]):
        pools.fill_slot(slot, start, history, generator)
    return pools


def test_folds_are_decided_by_what_would_overflow() -> None:
    history_len = ints(0, 12, 13, 16, 16, 16)
    slots = ints(0, 1, 2, 3, 4, -1, 5)
    num_verify_tokens = ints(16, 4, 4, 1, 0, 4, 8)
    is_fold = marks(*[9] * 7)
    decide_folds(history_len, slots, num_verify_tokens, is_fold, max_window=16)
    assert is_fold.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert history_len.tolist() == [0, 12, 13, 16, 16, 16]
    decide_folds(history_len, slots, num_verify_tokens, is_fold, max_window=15)
    assert is_fold.tolist() == [1, 1, 1, 1, 0, 0, 1]


def test_a_first_window_folds_early_by_slot() -> None:
    # Lengths 16, 7, 13, 3, 9, 15, 5, 11 of slots 0..7: multiples of 633 / 1024, mod 1.
    history_len = ints(12, 7, 12, 3, 9, 12, 5, 11)
    slots, is_fold = ints(*range(8)), marks(*[9] * 8)

    def decided(starts: torch.Tensor | None, num_rows: int = 1) -> list[int]:
        rows = torch.full((8,), num_rows, dtype=torch.int32)
        decide_folds(history_len, slots, rows, is_fold, max_window=16, ring_start=starts)
        return is_fold.tolist()

    assert decided(ints(*[0] * 8)) == [0, 1, 0, 1, 1, 0, 1, 1]
    history_len -= 1
    assert decided(ints(*[0] * 8)) == [0] * 8
    history_len += 1
    assert decided(ints(0, 5, 0, 31, 1, 0, 0, 16)) == [0, 0, 0, 0, 0, 0, 1, 0]
    assert decided(None) == [0] * 8
    assert decided(ints(*[0] * 8), num_rows=0) == [0] * 8
    assert decided(ints(*[0] * 8), num_rows=5) == [1] * 8


@pytest.mark.parametrize(("num_committed", "most"), [(4, 0.25), (2, 0.125), (1, 0.0625)])
@pytest.mark.parametrize(("num_requests", "stride"), [(16, 1), (64, 1), (256, 1), (64, 16)])
def test_requests_in_lockstep_fold_evenly(
    num_requests: int, stride: int, num_committed: int, most: float
) -> None:
    """A step folds hardly more than its share; without the early folds, all of them at once."""
    slots = torch.arange(num_requests, dtype=torch.int32) * stride
    for is_staggered in (False, True):
        seq_len, ring_start, history_len = (
            torch.zeros(num_requests * stride, dtype=torch.int32) for _ in range(3)
        )
        counts, is_fold = [], torch.zeros(num_requests, dtype=torch.int8)
        # Up to where a window of 16 has begun everywhere, and half as many steps again.
        for _ in range(48 // num_committed):
            rows = torch.full((num_requests,), num_committed, dtype=torch.int32)
            decide_folds(
                history_len, slots, rows, is_fold, max_window=16,
                ring_start=ring_start if is_staggered else None,
            )  # fmt: skip
            counts.append(int(is_fold.sum()))
            commit(
                seq_len, ring_start, history_len, slots, is_fold, rows, rows.clone(),
                ring_capacity=32,
            )  # fmt: skip
        assert max(counts) == num_requests or is_staggered
        assert max(counts) <= max(num_requests * most + 2, 1) or not is_staggered


def test_commit_by_hand() -> None:
    seq_len, ring_start, history_len = (
        ints(100, 200, 300, 400, 7),
        ints(0, 5, 30, 9, 1),
        ints(3, 14, 13, 16, 2),
    )
    slots, is_fold = ints(3, 0, -1, 2, 1), marks(1, 0, 1, 1, 1)
    num_verify_tokens, num_committed = ints(4, 4, 4, 3, 5), ints(0, 3, 2, 9, -1)
    for _ in range(2):
        commit(
            seq_len, ring_start, history_len, slots, is_fold, num_verify_tokens, num_committed,
            ring_capacity=32,
        )  # fmt: skip
        # slot 3 folded, 0 kept; slot 0 keeps 3; slot 2 folded, 9 cut to 3; slot 1 folded, -1 is 0
        assert seq_len.tolist() == [103, 200, 303, 400, 7]
        assert ring_start.tolist() == [0, 19, 11, 25, 1]
        assert history_len.tolist() == [6, 0, 3, 0, 2]
        assert is_fold.tolist() == [0] * 5
        assert num_verify_tokens.tolist() == [0] * 5
    assert num_committed.tolist() == [0, 3, 2, 9, -1]
    assert slots.tolist() == [3, 0, -1, 2, 1]


def test_commit_of_padding_only() -> None:
    cursors = [ints(5), ints(6), ints(7)]
    commit(*cursors, ints(-1), marks(1), ints(4), ints(4), ring_capacity=32)
    assert [cursor.tolist() for cursor in cursors] == [[5], [6], [7]]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("is_strided", [False, True], ids=["pools", "strided"])
def test_fold_takes_in_the_window(dtypes: Dtypes, is_strided: bool) -> None:
    pools = filled_pools(dtypes, is_strided=is_strided)
    before = pools.copies()
    slots, is_fold = ints(5, -1, 2, 3, 0, 1, 4), marks(1, 1, 1, 0, 1, 1, 1)
    expected = {
        slot: window_state(pools.state[slot], *pools.window(slot)) for slot in (5, 2, 0, 1, 4)
    }
    fold(pools.state, pools.ring, slots, is_fold=is_fold)
    for slot, state in expected.items():
        assert_close(pools.state[slot], state, dtypes.state, F64 if dtypes.state == F64 else F32)
    for slot in (0, 3, 6):  # nothing live, not marked, not named
        assert_same_bits(pools.state[slot], before[0][slot])
    for actual, old in zip(pools.tensors()[1:], before[1:], strict=True):
        assert_same_bits(actual, old)


def test_fold_and_commit_empty_the_window() -> None:
    session = Session(Geometry(), num_requests=1, starts=[29], bound=1e-10)
    session.step({0: 8}, {0: 6})
    pools, slots, is_fold = session.pools, ints(0), marks(1)
    fold(pools.state, pools.ring, slots, is_fold=is_fold)
    ring = pools.ring
    commit(
        pools.seq_len, ring.ring_start, ring.history_len, slots, is_fold, ints(0), ints(0),
        ring_capacity=32,
    )  # fmt: skip
    assert (int(ring.history_len[0]), int(ring.ring_start[0])) == (0, (29 + 6) % 32)
    assert int(pools.seq_len[0]) == 6
    session.check_states()
    session.step({0: 4}, {0: 4})
    session.check_states()


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_materialize_writes_the_state_after_n_rows(dtypes: Dtypes) -> None:
    for num_rows in (-1, 0, 1, 3, 7, 16, 99):
        pools = filled_pools(dtypes)
        before = pools.copies()
        materialize(pools.state, pools.ring, ints(4, -1), ints(6, 0), ints(num_rows, 1))
        n = max(0, min(num_rows, 7))
        rows = [part[:n] for part in pools.window(4)]
        expected = window_state(before[0][4], *rows)
        compute = F64 if dtypes.state == F64 else F32
        assert_close(pools.state[6], expected, dtypes.state, compute)
        assert_same_bits(pools.state[:6], before[0][:6])
        for actual, old in zip(pools.tensors()[1:], before[1:], strict=True):
            assert_same_bits(actual, old)


def test_materialize_into_the_same_slot_and_without_target() -> None:
    pools = filled_pools()
    before = pools.copies()
    expected = window_state(before[0][2], *(part[:3] for part in pools.window(2)))
    materialize(pools.state, pools.ring, ints(2, 3), ints(2, -1), ints(3, 4))
    assert_close(pools.state[2], expected, F64)
    assert_same_bits(pools.state[3:], before[0][3:])


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
    fold(pools.state, pools.ring, ints(2, 3), is_fold=marks(0, 0))
    materialize(pools.state, pools.ring, ints(), ints(), ints())
    for actual, old in zip(pools.tensors(), before, strict=True):
        assert_same_bits(actual, old)
