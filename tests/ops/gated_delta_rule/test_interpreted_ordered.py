"""The kernel with sums in one order, against the oracle in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl

from helpers.gdn_cases import Case, Dtypes, VerifyCall
from helpers.gdn_kernel_cases import KERNEL_CASES, SMALL
from helpers.gdn_walks import differing, run_walk, whole_tokens
from helpers.partitions import WALKS
from hybridspec.errors import UnsupportedError
from hybridspec.ops.gated_delta_rule import triton_ordered

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]

F32, F16 = torch.float32, torch.float16
CASES = [case for case in KERNEL_CASES if max(case.lengths, default=0) <= 8]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verify(case: Case) -> None:
    VerifyCall(case.using(Dtypes(F32, F32, F32))).check("ordered")


@pytest.mark.parametrize("state", [F32, F16], ids=str)
def test_states_and_rings_of_16_bits(state: torch.dtype) -> None:
    dtypes = Dtypes(F16, state, F16)
    case = Case("mix", (3, 1), (12, 2), (29, 0), geometry=SMALL, dtypes=dtypes)
    VerifyCall(case).check("ordered")


def test_what_it_refuses() -> None:
    call = VerifyCall(Case("long", (9, 1), (4, 2), geometry=SMALL, dtypes=Dtypes(F32, F32, F32)))
    with pytest.raises(UnsupportedError, match="is 9, the kernel takes up to 8"):
        call.check("ordered")


def test_sums_that_are_exact_are_the_same_in_every_step() -> None:
    tokens = whole_tokens()
    expected = run_walk(WALKS["one by one"], tokens)
    for name in ("eight at a time", "random", "one of eight"):
        assert differing(run_walk(WALKS[name], tokens), expected) == 0


def test_u_that_is_not_rounded_within_a_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = triton_ordered.solve_in_order

    def solve_wide(*arguments: Any) -> Any:
        return solve(*arguments[:-1], tl.float32)

    tokens = whole_tokens()
    expected = run_walk(WALKS["one by one"], tokens)
    monkeypatch.setattr(triton_ordered, "solve_in_order", solve_wide)
    assert differing(run_walk(WALKS["eight at a time"], tokens), expected)
