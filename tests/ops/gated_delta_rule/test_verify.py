"""One verify call against the oracle, in every layout; see `helpers.gdn_cases`."""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers.gdn_cases import DECAYS, Case, Dtypes, Geometry, VerifyCall, assert_same_bits
from helpers.tolerances import assert_same

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

CASES = [
    *(Case(f"T{n}", (n,), (5,)) for n in range(1, 9)),
    Case("T16", (16,), (0,)),
    Case("T16-full", (16,), (16,), (9,), geometry=Geometry(capacity=32)),
    Case("no-history", (4, 4), (0, 0)),
    Case("histories-differ", (3, 3, 3), (0, 7, 12), (4, 30, 21)),
    Case("full-window", (4,), (16,)),
    Case("wraps", (4, 2), (6, 6), (29, 30)),
    Case("append-wraps", (4,), (6,), (24,)),
    Case("ragged", (1, 5, 8, 3), (2, 0, 8, 13), (0, 31, 5, 17)),
    Case("first-empty", (0, 3), (4, 4)),
    Case("middle-empty", (2, 0, 3), (4, 9, 4)),
    Case("last-empty", (3, 2, 0), (4, 4, 15)),
    Case("all-empty", (0, 0), (3, 4)),
    Case("padding", (2, 3, 1), (4, 0, 6), slots=(5, -1, 2)),
    Case("padding-first", (3, 3), (0, 4), slots=(-1, 0)),
    Case("padding-only", (2, 2), (0, 0), slots=(-1, -1)),
    Case("tail", (3,), (4,), tail=5),
    Case("ragged-tail", (3, 1), (4, 2), tail=2),
    Case("all-fold", (4, 4, 4), (13, 16, 14), (1, 30, 20)),
    Case("some-fold", (8, 1, 8), (9, 9, 8), (25, 25, 25)),
    Case("fold-early", (2, 2), (3, 3), folds=(True, False)),
    Case("fold-nothing", (2,), (0,), folds=(True,)),
    Case("permuted", (2, 1, 4), (3, 14, 9), slots=(4, 0, 6)),
    Case("scale", (3,), (4,), scale=0.7),
    Case("no-l2norm", (3,), (4,), use_qk_l2norm=False, scale=0.1),
    Case("negative-eigenvalues", (8,), (4,), beta_scale=2.0),
    Case("strided", (2, 4), (5, 14), (30, 1), is_strided=True),
    Case("strided-dense", (3, 3), (5, 7), is_strided=True, tail=1),
    *(
        Case(f"ratio-{r}", (3, 2), (4, 15), geometry=Geometry(heads=h, value_heads=r * h))
        for r, h in ((1, 3), (2, 2), (3, 2), (4, 1), (8, 1))
    ),
    *(
        Case(f"K{k}-V{v}", (4,), (13,), geometry=Geometry(key_dim=k, value_dim=v))
        for k, v in ((16, 16), (32, 16), (16, 48), (96, 192), (128, 128))
    ),
    Case("small-ring", (2,), (2,), (3,), geometry=Geometry(capacity=4, max_window=2)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [F64, F32], ids=["fp64", "fp32"])
def test_verify_equals_the_recurrence(case: Case, dtype: torch.dtype) -> None:
    VerifyCall(case.using(Dtypes(dtype, dtype, dtype))).check()


DTYPES = [Dtypes(*some) for some in itertools.product((F32, BF16, F16), repeat=3)] + [
    Dtypes(F64, F32, F32),
    Dtypes(F32, F64, F32),
    Dtypes(F32, F32, F64),
    Dtypes(BF16, F64, BF16),
]


def test_every_pair_of_dtypes_in_one_process() -> None:
    """In both orders: what one call leaves behind must not reach the next."""
    case = Case("dtypes", (3, 4), (5, 14), (30, 4))
    for dtypes in (*DTYPES, *reversed(DTYPES)):
        VerifyCall(case.using(dtypes)).check()


@pytest.mark.parametrize("size", range(2, 17))
@pytest.mark.parametrize("dtype", [F64, F32], ids=["fp64", "fp32"])
def test_equal_keys_without_decay(size: int, dtype: torch.dtype) -> None:
    """The worst case of an inverse by doubling: its powers grow like binomials."""
    case = Case(
        "equal-keys",
        (size,),
        (0,),
        decay="none",
        equal_keys=True,
        dtypes=Dtypes(dtype, dtype, dtype),
    )
    VerifyCall(case).check()


@pytest.mark.parametrize("decay", list(DECAYS))
@pytest.mark.parametrize("gap", [0.01, 30.0, 200.0])
@pytest.mark.parametrize("dtype", [F64, F32], ids=["fp64", "fp32"])
def test_strong_decay(decay: str, gap: float, dtype: torch.dtype) -> None:
    """Gates of -200 per token, before and in the step, stay finite and right."""
    case = Case(
        "decay",
        (8, 5),
        (8, 14),
        (29, 3),
        decay=decay,
        history_gap=gap,
        dtypes=Dtypes(dtype, dtype, dtype),
    )
    VerifyCall(case).check()


@pytest.mark.parametrize("A_log", [4.0, 8.0])
def test_large_A_log(A_log: float) -> None:
    call = VerifyCall(Case("A_log", (8,), (6,), decay="mild", dtypes=Dtypes(F32, F32, F32)))
    call.tokens.A_log.fill_(A_log)
    call.check()


@pytest.mark.parametrize("dtypes", [Dtypes(F16, F16, F16), Dtypes(F16, F32, F16)], ids=str)
def test_rows_whose_squares_overflow_fp16(dtypes: Dtypes) -> None:
    VerifyCall(Case("large", (4, 8), (5, 14), magnitude=400.0, dtypes=dtypes)).check()


def test_given_output_is_filled_and_returned() -> None:
    call = VerifyCall(Case("out", (2, 3), (5, 5), slots=(3, -1), tail=2))
    out = torch.full((7, 4, 32), torch.nan, dtype=F64)
    assert call.check(out=out) is out


def test_a_later_call_leaves_an_earlier_result_alone() -> None:
    first, second = (VerifyCall(Case("out", (4,), (5,), seed=seed)) for seed in (0, 1))
    out = first.run()
    kept = out.clone()
    assert second.run().data_ptr() != out.data_ptr()
    assert_same_bits(out, kept)


def test_rows_are_not_changed() -> None:
    call = VerifyCall(Case("inputs", (4,), (5,), use_qk_l2norm=True))
    inputs = call.inputs()
    call.inputs = lambda: inputs  # type: ignore[method-assign]
    before = [rows.clone() for rows in inputs]
    call.run()
    for rows, old in zip(inputs, before, strict=True):
        assert_same_bits(rows, old)


def test_only_the_gates_may_be_slices() -> None:
    """a and b as two halves of one projection, q, k, v contiguous; then the other way round."""
    for chosen in ({3, 4}, {0, 1, 2}, {0}, {2}):
        call = VerifyCall(Case("slices", (4, 4), (5, 5), is_strided=True))
        mixed = [rows if i in chosen else rows.contiguous() for i, rows in enumerate(call.inputs())]
        call.inputs = lambda mixed=mixed: mixed  # type: ignore[method-assign]
        call.check()


def test_permuting_a_batch_permutes_its_results() -> None:
    lengths, history, starts = (4, 2, 3), (3, 15, 9), (0, 30, 25)
    order = (2, 0, 1)
    case = Case("order", lengths, history, starts, slots=(1, 4, 2))
    plain, other = VerifyCall(case), VerifyCall(case)
    out = plain.run()
    bounds = plain.cu_seqlens.tolist()
    rows = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])
    inputs = [part[rows] for part in other.inputs()]
    other.inputs = lambda: inputs  # type: ignore[method-assign]
    other.cu_seqlens = torch.tensor([0, 3, 7, 9], dtype=torch.int32)
    other.slot_tensor = other.slot_tensor[list(order)]
    other.is_fold = other.is_fold[list(order)]
    assert_same(other.run(), out[rows])
    for actual, expected in zip(other.pools.tensors(), plain.pools.tensors(), strict=True):
        assert_same(actual, expected)


def test_a_repeated_call_gives_the_same() -> None:
    case = Case("again", (4, 1, 3), (13, 16, 5), (30, 8, 2), dtypes=Dtypes(BF16, BF16, BF16))
    first, second = VerifyCall(case), VerifyCall(case)
    assert_same(first.run(), second.run())
    for one, other in zip(first.pools.tensors(), second.pools.tensors(), strict=True):
        assert_same(one, other)
