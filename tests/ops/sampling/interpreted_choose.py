"""The kernels that choose tokens against the CPU's backend; run by test_triton.py."""

from __future__ import annotations

import pytest
import torch

from helpers.choice_cases import random_case


@pytest.mark.parametrize("seed", range(12))
def test_small_vocabulary(seed: int) -> None:
    case = random_case(seed, slots=4, drafts=seed % 4)
    expected = case.choose(backend="reference")
    logits = case.logits.clone()
    found = case.choose(backend="triton")
    case.logits = logits
    assert torch.equal(found, expected)
