"""Taking live rows into a checkpoint: fold and materialize."""

from __future__ import annotations

import pytest
import torch

from helpers.gdn_cases import Dtypes, Geometry, assert_same_bits
from helpers.gdn_oracle import window_state
from helpers.gdn_sessions import Session
from helpers.ring_cases import filled_pools
from helpers.tolerances import assert_close
from hybridspec.ops.gated_delta_rule import fold, materialize
from hybridspec.ops.ring import commit

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
DTYPES = [Dtypes(), Dtypes(F32, F32, BF16), Dtypes(BF16, BF16, BF16), Dtypes(F16, F16, F32)]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def marks(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int8)


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


def test_nothing_to_do() -> None:
    pools = filled_pools()
    before = pools.copies()
    fold(pools.state, pools.ring, ints(2, 3), is_fold=marks(0, 0))
    materialize(pools.state, pools.ring, ints(), ints(), ints())
    for actual, old in zip(pools.tensors(), before, strict=True):
        assert_same_bits(actual, old)
