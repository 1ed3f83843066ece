"""Verify, then commit: the same as decoding the accepted tokens and never seeing the others."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.gdn_cases import Dtypes, Geometry
from helpers.gdn_sessions import Session

TINY = Geometry(heads=1, value_heads=2, key_dim=4, value_dim=3)
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
MIXES = [Dtypes(*some) for some in itertools.product((F32, BF16, F16), repeat=3)]


@dataclass(frozen=True)
class Plan:
    """One step: rows of each request, how many of them to commit, who folds early, padding."""

    sizes: tuple[int, ...]
    committed: tuple[int, ...]
    order: tuple[int, ...]
    early: tuple[int, ...]
    num_padding: int


@st.composite
def plans(draw: st.DrawFn, num_requests: int) -> Plan:
    order = draw(st.permutations(range(num_requests)))
    count = draw(st.integers(1, num_requests))
    sizes = draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    return Plan(
        sizes=tuple(sizes),
        committed=tuple(draw(st.integers(0, n)) for n in sizes),
        order=tuple(order[:count]),
        early=tuple(draw(st.sets(st.integers(0, num_requests - 1), max_size=1))),
        num_padding=draw(st.sampled_from((0, 0, 1))),
    )


@st.composite
def sessions(draw: st.DrawFn) -> tuple[dict, list[Plan]]:
    num_requests = draw(st.integers(1, 3))
    heads, ratio = draw(st.sampled_from(((1, 1), (1, 3), (2, 2))))
    options = {
        "geometry": Geometry(heads=heads, value_heads=heads * ratio, key_dim=4, value_dim=3),
        "num_requests": num_requests,
        "seed": draw(st.integers(0, 1 << 20)),
        "starts": draw(st.lists(st.integers(0, 31), min_size=num_requests, max_size=num_requests)),
        "decay": draw(st.sampled_from(("none", "mild", "medium", "-90"))),
    }
    return options, draw(st.lists(plans(num_requests), min_size=3, max_size=10))


def play(session: Session, steps: list[Plan]) -> None:
    """Run the steps and compare outputs in each, and states at the end."""
    for plan in steps:
        session.step(
            dict(zip(plan.order, plan.sizes, strict=True)),
            dict(zip(plan.order, plan.committed, strict=True)),
            early_folds=plan.early,
            num_padding=plan.num_padding,
        )
    session.check_states()


def sweep(size: int, committed: int, repeat: int) -> Counter[str]:
    """One step at every fill of the window, each in a request of its own."""
    starts = [(5 * fill + 7 * size + 11 * committed + 16 * repeat) % 32 for fill in range(17)]
    session = Session(
        TINY,
        num_requests=17,
        seed=100 * size + 10 * committed + repeat,
        starts=starts,
        bound=1e-10,
    )
    for first in range(0, 16, 8):
        session.step(
            {slot: min(8, slot - first) for slot in range(first + 1, 17)},
            dict.fromkeys(range(first + 1, 17), 8),
        )
    assert session.pools.ring.history_len.tolist() == [*range(17), 0]
    session.coverage.clear()
    every = range(17)
    session.step(dict.fromkeys(every, size), dict.fromkeys(every, committed))
    session.check_states()
    session.step(dict.fromkeys(every, 1), dict.fromkeys(every, 1))
    return session.coverage


def test_verify_then_commit_equals_decoding_the_accepted_tokens() -> None:
    """Every accept pattern at every fill, random sessions, every mix of dtypes: all in one run."""
    coverage: Counter[str] = Counter()
    for size in range(1, 9):
        for committed in range(size + 1):
            coverage += sweep(size, committed, repeat=(size + committed) % 2)

    @settings(derandomize=True, deadline=None, max_examples=60, database=None)
    @given(sessions())
    def any_session(drawn: tuple[dict, list[Plan]]) -> None:
        options, steps = drawn
        session = Session(**options, bound=1e-10)
        play(session, steps)
        coverage.update(session.coverage)

    any_session()
    for seed, dtypes in enumerate(MIXES):
        session = Session(TINY, dtypes, num_requests=2, seed=seed, starts=[seed, 31 - seed])
        steps = [
            Plan((4, 1 + i % 8), (i % 5, (3 * i) % (2 + i % 8)), (i % 2, 1 - i % 2), (), i % 3 == 0)
            for i in range(12)
        ]
        play(session, steps)
        coverage.update(session.coverage)

    wanted = {"fold", "reject", "window wraps", "append wraps"}
    wanted |= {f"T={n}" for n in range(9)}
    wanted |= {f"commit {kept} of {n}" for n in range(9) for kept in range(n + 1)}
    wanted |= {f"start={row}" for row in range(32)}
    wanted |= {f"fill={count}" for count in range(17)}
    wanted |= {str(dtypes) for dtypes in (Dtypes(), *MIXES)}
    wanted |= {f"fold at {fill}, commit {kept}" for fill in range(9, 17) for kept in range(9)}
    assert wanted - set(coverage) == set(), "the run did not meet these"


@pytest.mark.parametrize("seed", range(3))
def test_nothing_committed_in_the_middle_of_a_batch(seed: int) -> None:
    session = Session(TINY, num_requests=3, seed=seed, starts=[0, 30, 11], bound=1e-10)
    for _ in range(18):
        session.step({0: 3, 1: 4, 2: 2}, {0: 2, 1: 0, 2: 1})
        session.check_states()
    assert session.coverage["fold"] > 2
    assert session.pools.seq_len.tolist() == [36, 0, 18, 0]


def test_an_aborted_fold_commits_nothing_and_loses_nothing() -> None:
    session = Session(TINY, starts=[29], bound=1e-10)
    session.step({0: 8}, {0: 8})
    session.step({0: 7}, {0: 7})
    session.step({0: 4}, {0: 0})
    assert session.coverage["fold"] == 1
    assert int(session.pools.ring.history_len[0]) == 0
    assert int(session.pools.ring.ring_start[0]) == (29 + 15) % 32
    session.check_states()
    session.step({0: 5}, {0: 5})
    session.check_states()


def test_a_second_commit_of_a_step_changes_nothing() -> None:
    once, twice = (Session(TINY, num_requests=2, bound=1e-10) for _ in range(2))
    for step in range(15):
        rows, kept = {0: 4, 1: 3}, {0: step % 5, 1: step % 4}
        once.step(rows, kept)
        twice.step(rows, kept, commits=2)
        twice.check_states()
        assert twice.pools.seq_len.tolist() == once.pools.seq_len.tolist()
        assert twice.pools.ring.history_len.tolist() == once.pools.ring.history_len.tolist()
    assert twice.coverage["fold"] > 2


def test_a_used_slot_serves_a_new_request_like_a_fresh_one() -> None:
    used = Session(TINY, bound=1e-10)
    for _ in range(9):
        used.step({0: 4}, {0: 3})
    used.admit(0, start=17)
    for _ in range(9):
        used.step({0: 4}, {0: 2})
        used.check_states()
    assert used.coverage["fold"] > 1


def test_rejected_rows_may_hold_anything() -> None:
    """NaN or infinity in rows behind the window leaves no trace."""
    session = Session(TINY, starts=[27], bound=1e-10)
    for step in range(10):
        session.step({0: 3}, {0: 2})
        pools = session.pools
        for row in pools.free_rows(0, 16):
            for pool in (pools.ring.k, pools.ring.u, pools.ring.cum_log_decay):
                pool[0][:, row] = torch.nan if step % 2 else torch.inf
        session.check_states()
    assert session.coverage["fold"] > 0


def test_the_session_has_teeth() -> None:
    """A ring row that is off by one part in 10^6 is seen by the next step."""
    session = Session(TINY, decay="none", bound=1e-10)
    session.step({0: 4}, {0: 4})
    session.pools.ring.u[0][:, 1] *= 1 + 1e-6
    with pytest.raises(AssertionError, match="not close"):
        session.step({0: 1}, {0: 1})
