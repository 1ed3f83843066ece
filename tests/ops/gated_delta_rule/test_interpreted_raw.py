"""The kernel of the raw ring against the oracle in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers.gdn_cases import Dtypes
from helpers.raw_cases import RAW_CASES, RawCall, RawCase

# Decays that are selected away may overflow; the interpreter's NumPy says so.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("case", RAW_CASES, ids=str)
def test_verify(case: RawCase) -> None:
    RawCall(case.using(Dtypes(F32, F32, F32))).check("triton")


@pytest.mark.parametrize(
    "dtypes", [Dtypes(*some) for some in itertools.product((F32, BF16, F16), repeat=3)], ids=str
)
def test_every_mix_of_dtypes(dtypes: Dtypes) -> None:
    # Stores of bf16 truncate in the interpreter: one more unit than on a device.
    RawCall(RawCase("mix", (3, 4), (5, 8), (30, 4)).using(dtypes)).check("triton")


def test_value_rows_split_between_programs() -> None:
    """Two programs a head: one appends keys and gates, both their part of all else."""
    case = RawCase("split", (3, 2, 1), (8, 4, 0), slots=(3, 1, -1), tail=2)
    geometry = case.geometry.__class__(heads=2, value_heads=4, value_dim=32, max_window=8)
    RawCall(case.using(Dtypes(F32, F32, F32), geometry=geometry)).check("triton")
