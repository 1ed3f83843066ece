"""Sampling on a CUDA device against the CPU: same words, same noise to an ulp, same tokens."""

from __future__ import annotations

import pytest
import torch

from hybridspec.ops.sampling import (
    accept_drafts,
    gumbel_noise,
    philox,
    sample,
)

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

    logits = torch.randn(count, vocab, generator=generator) * 3
    temperature = (torch.arange(count) % 4) / 2
    top_k = (torch.arange(count) % 5 * 20).int()
    top_p = 1 - (torch.arange(count) % 3) / 10
    min_p = (torch.arange(count) % 2) / 50
    arguments = (logits, temperature, top_k, top_p, min_p, noise)
    tokens = sample(*arguments)
    moved = sample(*(a.cuda() for a in arguments[:-1]), moved_noise)
    assert torch.equal(moved.cpu(), tokens)

    drafts = torch.where(torch.rand(count, generator=generator) < 0.7, tokens.roll(1), 3)
    bounds = (torch.arange(17) * 4).int()
    accepted = accept_drafts(moved, drafts.cuda(), bounds.cuda())
    assert torch.equal(accepted.cpu(), accept_drafts(tokens, drafts, bounds))
