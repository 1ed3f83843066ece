"""The rows of a window give the same bits however they are cut into steps."""

from __future__ import annotations

import pytest
import torch

from helpers.gdn_cases import Case, VerifyCall
from helpers.gdn_kernel_cases import ORDERED_CASES, ORDERED_MODES
from helpers.gdn_walks import differing, random_tokens, run_walk
from helpers.partitions import WALKS

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("backend", ["ordered", "ordered_cuda"])
@pytest.mark.parametrize("state_dtype", [BF16, torch.float32], ids=str)
def test_every_walk_gives_the_same_bits(state_dtype: torch.dtype, backend: str) -> None:
    tokens = random_tokens(state_dtype)
    expected = run_walk(WALKS["one by one"], tokens, backend)
    found = {
        name: differing(run_walk(how, tokens, backend), expected) for name, how in WALKS.items()
    }
    # One of the kernels is built anew for at most four rows of a request.
    for name in ("one by one", "three at a time"):
        few = run_walk(WALKS[name], tokens, backend, max_rows=3)
        found[f"{name}, at most 3"] = differing(few, expected)
    assert found == dict.fromkeys(found, 0)


@pytest.mark.parametrize(
    "case",
    [
        case.using(dtypes)
        for dtypes in ORDERED_MODES
        for case in ORDERED_CASES
        if dtypes == ORDERED_MODES[0] or "ratio" not in case.name
    ],
    ids=str,
)
def test_the_kernel_in_cuda(case: Case) -> None:
    VerifyCall(case, "cuda").check("ordered_cuda", F16 if case.dtypes.rows == F16 else BF16)


def test_the_fast_kernel_does_not() -> None:
    """So the comparison can fail."""
    tokens = random_tokens(BF16)
    expected = run_walk(WALKS["one by one"], tokens, "triton")
    assert differing(run_walk(WALKS["eight at a time"], tokens, "triton"), expected)
