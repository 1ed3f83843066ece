"""The decision to fold, and cursors that move: by hand, and in lockstep."""

from __future__ import annotations

import pytest
import torch

from hybridspec.ops.ring import advance, commit, decide_folds


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def marks(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int8)


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


def test_a_prefill_moves_the_position_only_where_there_is_a_slot() -> None:
    seq_len = ints(5, 0, 7)
    advance(seq_len, ints(2, -1, 1, -1), ints(3, 100, 4, 5))
    assert seq_len.tolist() == [5, 4, 10]
    advance(seq_len, ints(), ints())
    assert seq_len.tolist() == [5, 4, 10]
