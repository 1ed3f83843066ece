"""Log-probabilities in fixed shapes."""

from __future__ import annotations

import torch

from hybridspec.ops.sampling import NUM_REPORTED, report


def test_equals_log_softmax() -> None:
    logits = torch.randn(5, 90, generator=torch.Generator().manual_seed(0)) * 4
    tokens = torch.tensor([3, 89, 0, 7, -1])
    found = report(logits, tokens)
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(NUM_REPORTED)
    assert torch.equal(found.ids[:, 1:], ids)
    assert torch.equal(found.logprobs[:, 1:], values)
    own = logprobs[torch.arange(5), tokens.clamp(min=0)]
    assert torch.equal(found.logprobs[:, 0], own)
    assert found.ids[:, 0].tolist() == [3, 89, 0, 7, 0]
    order = logits.argsort(descending=True).tolist()
    ranks = [
        row.index(max(token, 0)) + 1 for row, token in zip(order, tokens.tolist(), strict=True)
    ]
    assert found.rank.tolist() == ranks


def test_small_vocabulary() -> None:
    found = report(torch.zeros(2, 7), torch.tensor([1, 2]))
    assert found.ids.shape == found.logprobs.shape == (2, NUM_REPORTED + 1)
    assert (found.ids[:, 8:] == -1).all()
    assert (found.logprobs[:, 8:] == -torch.inf).all()
