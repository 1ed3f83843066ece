"""Log-probabilities of tokens under the model's own distribution.

They are log_softmax of the raw logits: before bias, penalties, temperature and filters, so they say
what the model thought, whatever the sampler made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Logprob", "TokenLogprobs", "report_logprobs"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model found a token at one place.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 + the number of tokens that were more likely.
        decoded_token: the token's text, special tokens written out; None where no text is made.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# By token id: the token that stands there, then the most likely ones, most likely first.
TokenLogprobs = dict[int, Logprob]


def report_logprobs(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Report the token of each row and the most likely ones; nothing is modified.

    Args:
        logits: raw scores, [N, V], fp32; in.
        tokens: the token that stands at each row's place, N of them.
        counts: how many of the most likely tokens to report, N of them; 0 is none.

    Returns:
        For each row, by token id: the row's token first, then the others.

    Numerics:
        log_softmax in fp32.
    """
    log_probs = torch.log_softmax(logits, -1)
    ids = torch.tensor(list(tokens), device=logits.device).unsqueeze(-1)
    own = log_probs.gather(-1, ids)
    ranks = ((log_probs > own).sum(-1) + 1).tolist()
    top = torch.topk(log_probs, max(counts), dim=-1)
    rows = zip(
        tokens, own[:, 0].tolist(), ranks, counts, top.values.tolist(), top.indices.tolist(),
        strict=True,
    )  # fmt: skip
    reports = []
    for token, logprob, rank, count, values, indices in rows:
        report = {token: Logprob(logprob, rank)}
        best = zip(indices[:count], values[:count], strict=True)
        for place, (index, value) in enumerate(best, start=1):
            report.setdefault(index, Logprob(value, place))
        reports.append(report)
    return reports
