"""Verify over a raw ring against the recurrence in fp64; see `helpers.raw_cases`."""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers.gdn_cases import Dtypes, Geometry, offsets
from helpers.gdn_oracle import Tokens, recurrence
from helpers.raw_cases import RAW_CASES, REGIMES, RawCall, RawCase
from helpers.tolerances import assert_same
from helpers.torch_globals import GLOBALS
from hybridspec.errors import UnsupportedError
from hybridspec.ops import gated_delta_rule
from hybridspec.ops.gated_delta_rule import FoldingBatch, Gates, Rows, State, raw_cpu, raw_naive
from hybridspec.ops.ring import commit, decide_folds

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("case", RAW_CASES, ids=str)
@pytest.mark.parametrize("dtype", [F64, F32], ids=["fp64", "fp32"])
def test_equals_the_recurrence(case: RawCase, dtype: torch.dtype) -> None:
    RawCall(case.using(Dtypes(dtype, dtype, dtype))).check()


@pytest.mark.parametrize(
    "dtypes", [Dtypes(*some) for some in itertools.product((F32, BF16, F16), repeat=3)], ids=str
)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_mix_of_dtypes(regime: str, dtypes: Dtypes) -> None:
    RawCall(RawCase("mix", (3, 4), (5, 8), (30, 4), regime=regime).using(dtypes)).check()


@pytest.mark.parametrize("name", ["ragged", "padding-tail", "options", "some-fold-permuted"])
def test_the_definition_is_what_a_cpu_runs(name: str) -> None:
    [case] = [case for case in RAW_CASES if case.name == name]
    found = []
    for backend in (raw_naive, raw_cpu):
        call = RawCall(case)
        rows = call.inputs()
        out = torch.full_like(rows[2], torch.nan)
        backend.verify(
            Rows(*rows, out),
            Gates(call.A_log, call.dt_bias, case.scale, case.use_qk_l2norm, case.beta_scale),
            State(call.state, None),
            call.ring,
            FoldingBatch(
                offsets(case.lengths),
                torch.tensor(call.slots, dtype=torch.int32),
                torch.tensor(call.folds, dtype=torch.int8),
                max(case.lengths),
            ),
        )
        found.append((out, call.state, *call.ring[:4]))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11, equal_nan=True)


def test_the_comparison_has_teeth() -> None:
    """A row of the window that is taken as dead is far beyond the tolerance."""
    call = RawCall(RawCase("teeth", (3,), (8,)))
    expected = call.run().clone()
    call.ring.history_len.sub_(1)
    assert (call.run() - expected).abs().max() > 1e-3 * expected.abs().max()


def test_a_fold_of_16_bit_rows_into_an_fp32_state_is_exact() -> None:
    """The reason for a raw ring: nothing was rounded on the way."""
    for regime in REGIMES:
        call = RawCall(RawCase("fold", (4,), (8,), regime=regime).using(Dtypes(BF16, F32, BF16)))
        _, expected = call.expected(0)
        call.run()
        actual = call.state[call.slots[0]].double()
        assert (actual - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 8])
def test_steps_and_commits_equal_one_token_after_another(num_tokens: int) -> None:
    """With W = 16 - T and the usual rule of folds no window ever outgrows 16 rows with its step."""
    geometry = Geometry(1, 2, 16, 16, capacity=16, max_window=16 - num_tokens, num_slots=2)
    call = RawCall(RawCase("session", (num_tokens,), (0,), slots=(1,), geometry=geometry))
    generator = torch.Generator().manual_seed(num_tokens)
    first, ring = call.state[1].clone(), call.ring
    seq_len, slots = torch.zeros(2, dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    taken: list[list[torch.Tensor]] = []
    num_folds = 0
    for _ in range(40):
        new = call._rows(num_tokens, F64)
        is_fold = torch.zeros(1, dtype=torch.int8)
        counts = torch.tensor([num_tokens], dtype=torch.int32)
        decide_folds(ring.history_len, slots, counts, is_fold, max_window=ring.max_window)
        num_folds += int(is_fold)
        out = gated_delta_rule.verify_raw(
            *new, call.A_log, call.dt_bias, call.state, ring, offsets((num_tokens,)), slots,
            max_verify_tokens=num_tokens, is_fold=is_fold,
        )  # fmt: skip
        rows = taken + [[part[t] for part in new] for t in range(num_tokens)]
        tokens = Tokens(*map(torch.stack, zip(*rows, strict=True)), call.A_log, call.dt_bias)
        torch.testing.assert_close(
            out, recurrence(tokens, first)[0][-num_tokens:], rtol=1e-9, atol=1e-9
        )
        kept = int(torch.randint(0, num_tokens + 1, (), generator=generator))
        taken = rows[: len(taken) + kept]
        commit(
            seq_len, ring.ring_start, ring.history_len, slots, is_fold, counts,
            torch.tensor([kept], dtype=torch.int32), ring_capacity=16,
        )  # fmt: skip
        assert int(ring.history_len[1]) <= ring.max_window
    assert num_folds > 0 and int(seq_len[1]) == len(taken)


def clean_call() -> RawCall:
    """Return a call without NaN, since opcheck compares runs with ==."""
    call = RawCall(RawCase("library", (3, 2), (5, 8), (30, 2)).using(Dtypes(F32, F32, F32)))
    for pool in (call.state, *call.ring[:4]):
        pool.nan_to_num_()
    return call


def changed(call: RawCall) -> list[torch.Tensor]:
    """Return what a call may change."""
    return [call.state, *call.ring[:4]]


def test_passes_opcheck() -> None:
    call = clean_call()
    rows = call.inputs()
    arguments = (
        *rows, torch.empty_like(rows[2]), call.A_log, call.dt_bias, 0.5, True, 1.0, call.state,
        None, *call.ring, offsets((3, 2)), torch.tensor([6, 5], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int8), 3, None, False, -1, False, None, "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.hybridspec.gated_delta_rule_verify_raw.default, arguments)


@pytest.mark.parametrize("entered", GLOBALS, ids=str)
def test_does_not_depend_on_what_torch_has_set(entered: str) -> None:
    expected, call = clean_call(), clean_call()
    usual, inputs = expected.run(), call.inputs()
    call.inputs = lambda: inputs  # type: ignore[method-assign]
    with GLOBALS[entered]():
        out = call.run()
    assert_same(out, usual)
    for mine, other in zip(changed(call), changed(expected), strict=True):
        assert_same(mine, other)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"v": torch.zeros(3, 2, 15)}, r"v: expected|ring.v: expected|state: expected"),
        ({"k": torch.zeros(4, 1, 16)}, "q: expected shape|k: expected shape"),
        ({"max_verify_tokens": 30}, "more need 38 ring rows"),
        ({"max_verify_tokens": 2}, "max_verify_tokens: expected at least the rows"),
        ({"is_fold": torch.zeros(2, dtype=torch.int8)}, "is_fold: expected shape"),
        ({"scale": "one"}, "scale: expected a number"),
        ({"backend": "fast"}, "backend"),
    ],
)
def test_errors(changes: dict, text: str) -> None:
    call = RawCall(RawCase("errors", (3,), (5,)).using(Dtypes(F32, F32, F32)))
    names = ("q", "k", "v", "a", "b")
    rows = [changes.pop(name, part) for name, part in zip(names, call.inputs(), strict=True)]
    call.inputs = lambda: rows  # type: ignore[method-assign]
    with pytest.raises((TypeError, ValueError), match=text):
        call.run(**changes)


def test_errors_of_the_ring() -> None:
    call = RawCall(RawCase("errors", (3,), (5,)).using(Dtypes(F32, F32, F32)))
    ring = call.ring
    for wrong, text in (
        (ring._replace(a=ring.a.bfloat16()), "ring.a: expected dtype"),
        (ring._replace(v=ring.v.bfloat16()), "ring.v: expected dtype float32"),
        (ring._replace(v=ring.v[:, :, :16]), "ring.v: expected shape"),
        (ring._replace(history_len=ring.history_len.long()), "ring.history_len: expected dtype"),
        (ring._replace(max_window=0), "ring.max_window: expected at least 1"),
        (ring._replace(history_len=ring.history_len + 9), "ring.history_len: expected 0..8"),
        (ring._replace(ring_start=ring.ring_start + 32), "ring.ring_start: expected a row below"),
        (tuple(ring), "ring: expected a RawRingView"),
    ):
        call.ring = wrong
        with pytest.raises((TypeError, ValueError), match=text):
            call.run()


def test_a_slot_twice() -> None:
    call = RawCall(RawCase("twice", (2, 2), (3, 3), slots=(2, 1)).using(Dtypes(F32, F32, F32)))
    call.slots = (2, 2)
    with pytest.raises(ValueError, match="no slot twice"):
        call.run()


def test_what_asks_for_more_rows_than_kernels_take() -> None:
    """The reference has no such limit; the message says which number is too large."""
    geometry = Geometry(1, 2, 16, 16, capacity=32, max_window=16)
    case = RawCase("wide", (8,), (16,), geometry=geometry)
    RawCall(case).check("reference")
    with pytest.raises(UnsupportedError):
        RawCall(case.using(Dtypes(F32, F32, F32))).run("cuda")
