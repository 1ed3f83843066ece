"""The kernel with sums in one order, against the oracle in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.gdn_cases import Case, Dtypes, VerifyCall
from helpers.gdn_kernel_cases import KERNEL_CASES, SMALL
from hybridspec.errors import UnsupportedError

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
