"""Drafter-invariant sampling: which token stands at a position of a request.

The token is argmax(processed logits + Gumbel noise(seed, position, token)), a pure function of the
prefix and of the request's parameters. Target and drafter both call it, with the same noise, which
makes them agree often and lets the output be independent of what was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec.ops.sampling import gumbel_noise, sample

__all__ = ["ChoiceRule", "choose_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRule:
    """How one request's tokens are chosen.

    Attributes:
        temperature, top_k, top_p, min_p: as in SamplingParams.
        seed: of the Gumbel noise.
        forbidden: token ids that cannot be chosen before position `forbidden_until`.
        forbidden_until: first position at which they can.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    forbidden: tuple[int, ...] = ()
    forbidden_until: int = 0


def choose_tokens(logits: Tensor, rules: Sequence[ChoiceRule], positions: Sequence[int]) -> Tensor:
    """Choose one token per row; the logits may be overwritten.

    Args:
        logits: raw scores, [N, vocab], fp32; in, scratch.
        rules: the rule of each row, N of them.
        positions: position in its request of the token to choose, N of them.

    Returns:
        Token ids [N], int64.
    """
    for row, (rule, position) in enumerate(zip(rules, positions, strict=True)):
        if position < rule.forbidden_until:
            logits[row, list(rule.forbidden)] = -torch.inf
    if all(rule.temperature == 0 for rule in rules):
        return torch.argmax(logits, dim=-1)
    device = logits.device

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    noise = gumbel_noise(
        column([rule.seed for rule in rules], torch.int64),
        column(list(positions), torch.int64),
        logits.shape[-1],
    )
    return sample(
        logits,
        column([rule.temperature for rule in rules], torch.float32),
        column([rule.top_k for rule in rules], torch.int32),
        column([rule.top_p for rule in rules], torch.float32),
        column([rule.min_p for rule in rules], torch.float32),
        noise,
    )
