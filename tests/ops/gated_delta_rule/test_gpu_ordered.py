"""The rows of a window give the same bits however they are cut into steps."""

from __future__ import annotations

import pytest
import torch

from helpers.gdn_walks import differing, random_tokens, run_walk
from helpers.partitions import WALKS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_walk_gives_the_same_bits(state_dtype: torch.dtype) -> None:
    tokens = random_tokens(state_dtype)
    expected = run_walk(WALKS["one by one"], tokens)
    found = {name: differing(run_walk(how, tokens), expected) for name, how in WALKS.items()}
    assert found == dict.fromkeys(WALKS, 0)


def test_the_fast_kernel_does_not() -> None:
    """So the comparison can fail."""
    tokens = random_tokens(torch.bfloat16)
    expected = run_walk(WALKS["one by one"], tokens, "triton")
    assert differing(run_walk(WALKS["eight at a time"], tokens, "triton"), expected)
