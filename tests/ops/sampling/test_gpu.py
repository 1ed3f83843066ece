"""Noise on a CUDA device against the CPU: the same words, the same noise to an ulp."""

from __future__ import annotations

import pytest
import torch

from hybridspec.ops.sampling import gumbel_noise, philox

pytestmark = pytest.mark.gpu


def test_equals_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    count, vocab = 64, 1001
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    positions = torch.randint(0, 2**31, (count,), generator=generator)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    counter = (torch.arange(50)[None], positions[:, None], zero, zero)
    words = philox(seeds.cuda(), tuple(word.cuda() for word in counter))
    assert torch.equal(words.cpu(), philox(seeds, counter))
    noise = gumbel_noise(seeds, positions, vocab)
    moved_noise = gumbel_noise(seeds.cuda(), positions.cuda(), vocab)
    torch.testing.assert_close(moved_noise.cpu(), noise, rtol=2e-7, atol=1e-7)
