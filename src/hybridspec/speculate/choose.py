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
from hybridspec.speculate.logprobs import TokenLogprobs, report_logprobs
from hybridspec.speculate.penalties import LogitEdits, edit_logits

__all__ = ["NO_TOKEN", "ChoiceRule", "choose_and_report", "choose_tokens"]

NO_TOKEN = -1  # stands where logits are NaN, so that they choose nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRule:
    """How one request's tokens are chosen.

    Attributes:
        temperature, top_k, top_p, min_p: as in SamplingParams.
        seed: of the Gumbel noise.
        forbidden: token ids that cannot be chosen before position `forbidden_until`.
        forbidden_until: first position at which they can.
        edits: bias, penalties and bad words with the tokens so far, or None for none of them.
        num_logprobs: most likely tokens to report beside each chosen one; None reports nothing.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    forbidden: tuple[int, ...] = ()
    forbidden_until: int = 0
    edits: LogitEdits | None = None
    num_logprobs: int | None = None


def choose_tokens(
    logits: Tensor,
    rules: Sequence[ChoiceRule],
    positions: Sequence[int],
    pending: Sequence[Sequence[int]],
) -> Tensor:
    """Choose one token per row; the logits may be overwritten.

    The order of processing: bias and penalties (`edit_logits`), -inf for what is forbidden, then
    temperature, top_k, top_p, min_p and the noise (`hybridspec.ops.sampling.sample`).

    Args:
        logits: raw scores, [N, vocab], fp32; in, scratch.
        rules: the rule of each row, N of them.
        positions: position in its request of the token to choose, N of them.
        pending: drafts between the newest committed token of the request and the token to choose,
            N of them.

    Returns:
        Token ids [N], int64.
    """
    forbidden = [
        (row, token)
        for row, (rule, position) in enumerate(zip(rules, positions, strict=True))
        if position < rule.forbidden_until
        for token in rule.forbidden
    ]
    if any(rule.edits is not None for rule in rules):
        forbidden += edit_logits(logits, [rule.edits for rule in rules], pending)
    if forbidden:
        logits[torch.tensor(forbidden, device=logits.device).unbind(-1)] = -torch.inf
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


def choose_and_report(
    logits: Tensor,
    rules: Sequence[ChoiceRule],
    positions: Sequence[int],
    pending: Sequence[Sequence[int]],
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Choose one token per row as `choose_tokens` does, and report log-probabilities.

    Returns:
        The tokens, NO_TOKEN where a logit is NaN, and for each row what its request wants to know,
        None if it asked for nothing.
    """
    is_nan = logits.amax(-1).isnan()  # before the logits are edited

    def choose() -> list[int]:
        chosen = choose_tokens(logits, rules, positions, pending)
        return chosen.masked_fill_(is_nan, NO_TOKEN).tolist()

    asking = [row for row, rule in enumerate(rules) if rule.num_logprobs is not None]
    if not asking:
        return choose(), [None] * len(rules)
    raw = logits[torch.tensor(asking, device=logits.device)]  # a copy: the logits get edited
    tokens = choose()
    counts = [count for rule in rules if (count := rule.num_logprobs) is not None]
    found = iter(report_logprobs(raw, [max(tokens[row], 0) for row in asking], counts))
    return tokens, [None if rule.num_logprobs is None else next(found) for rule in rules]
