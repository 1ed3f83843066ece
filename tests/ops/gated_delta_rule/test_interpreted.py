"""Kernels against the oracle in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers.gdn_cases import Case, Dtypes, Geometry, VerifyCall, assert_same_bits
from helpers.gdn_kernel_cases import KERNEL_CASES, SMALL
from helpers.gdn_sessions import Session
from helpers.ring_cases import compare_backends
from hybridspec.ops import gated_delta_rule
from hybridspec.ops.gated_delta_rule import launch

# Decays that are selected away may overflow; the interpreter's NumPy says so.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_verify(case: Case) -> None:
    VerifyCall(case.using(Dtypes(F32, F32, F32))).check("triton")


@pytest.mark.parametrize(
    "dtypes", [Dtypes(*some) for some in itertools.product((F32, BF16, F16), repeat=3)], ids=str
)
def test_every_mix_of_dtypes(dtypes: Dtypes) -> None:
    # Stores of bf16 truncate in the interpreter: one more unit than on a device.
    case = Case("mix", (3, 1), (14, 2), (29, 0), geometry=SMALL, dtypes=dtypes)
    VerifyCall(case).check("triton")


@pytest.mark.parametrize("state", [F16, F32], ids=str)
def test_rows_whose_squares_overflow_fp16(state: torch.dtype) -> None:
    dtypes = Dtypes(F16, state, F16)
    case = Case("large", (3, 8), (14, 2), magnitude=400.0, geometry=SMALL, dtypes=dtypes)
    VerifyCall(case).check("triton", F16)


def test_without_is_fold_the_checkpoints_are_not_written() -> None:
    call = VerifyCall(Case("plain", (4, 4), (12, 3), (30, 0), geometry=SMALL))
    call.case = call.case.using(Dtypes(F32, F32, F32))
    call = VerifyCall(call.case)
    call.check("triton", is_fold=None)


def test_value_rows_split_between_programs() -> None:
    """Two programs a head: one appends k and decay, both their part of u, outputs and state."""
    case = Case("split", (3, 2, 1), (15, 4, 0), slots=(3, 1, -1), tail=2)
    call = VerifyCall(case.using(Dtypes(F32, F32, F32)))
    config = launch.choose_verify_launch((9, 0), None, 1, 16, 32, 8, launch.EXACT)
    assert config.splits == 2
    call.check("triton")


@pytest.mark.parametrize("dtype", [F32, F16], ids=["fp32", "fp16"])
def test_sessions_of_verify_commit_and_fold(dtype: torch.dtype) -> None:
    geometry = Geometry(1, 2, 16, 16)
    session = Session(
        geometry, Dtypes(dtype, dtype, dtype), num_requests=2, starts=[29, 3], backend="triton"
    )
    for step in range(8):
        session.step({1: 4, 0: 1 + step % 8}, {0: step % 4, 1: 3}, num_padding=step % 2)
    session.check_states()
    assert session.coverage["fold"] > 1 and session.coverage["reject"] > 4


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_fold() -> None:
    marks = torch.tensor([1, 0, 1, 1, 1], dtype=torch.int8)
    slots = int32(3, 1, 0, -1, 4)
    compare_backends(
        lambda pools, backend: gated_delta_rule.fold(
            pools.state, pools.ring, slots, is_fold=marks, backend=backend
        )
    )


def test_materialize() -> None:
    compare_backends(
        lambda pools, backend: gated_delta_rule.materialize(
            pools.state,
            pools.ring,
            int32(3, 1, 0, -1, 2),
            int32(5, 6, 0, 2, -1),
            int32(7, 99, 0, 3, 1),
            backend=backend,
        )
    )


def test_the_comparison_has_teeth() -> None:
    """A window row that is taken as dead changes the outputs by far more than the tolerance."""
    call = VerifyCall(Case("teeth", (3,), (9,), geometry=SMALL).using(Dtypes(F32, F32, F32)))
    call.pools.ring.history_len.sub_(1)
    expected = call.run("triton").clone()
    call.pools.ring.history_len.add_(1)
    actual = call.run("triton")
    assert (actual - expected).abs().max() > 1e-3 * expected.abs().max()
    with pytest.raises(AssertionError):
        assert_same_bits(actual, expected)
