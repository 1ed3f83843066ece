"""Log-probabilities of tokens under the model's own distribution.

They are log_softmax of the raw logits: before bias, penalties, temperature and filters, so they are
the model's own, whatever the sampler made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Logprob", "LogprobReport", "TokenLogprobs", "rank_logprobs", "report_logprobs"]


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


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """Log-probabilities of rows, on the device, in one tensor so that one copy fetches them.

    Attributes:
        packed: [N, 2 + 2 c] int32: rank of the row's token, bits of its log-probability (fp32),
            the c most likely tokens, bits of theirs.
    """

    packed: Tensor

    def read(self, tokens: Sequence[int], counts: Sequence[int], first: int) -> list[TokenLogprobs]:
        """Report rows first, first + 1, ...; on a device this waits for it.

        Args:
            tokens: the token that stands at each row's place.
            counts: how many of the most likely tokens to report of each row; 0 is none.
            first: the first row.

        Returns:
            For each row, by token id: the row's token first, then the others.
        """
        most = self.packed.shape[1] // 2 - 1
        rows = self.packed[first : first + len(tokens)]
        values = rows.view(torch.float32)
        reports = []
        for token, count, row, value in zip(
            tokens, counts, rows.tolist(), values.tolist(), strict=True
        ):
            report = {token: Logprob(value[1], row[0])}
            for place in range(count):
                logprob = Logprob(value[2 + most + place], place + 1)
                report.setdefault(row[2 + place], logprob)
            reports.append(report)
        return reports


def rank_logprobs(logits: Tensor, tokens: Tensor, count: int) -> LogprobReport:
    """Find the log-probability and rank of each row's token, and the most likely ones.

    Args:
        logits: raw scores, [N, V], fp32; in.
        tokens: the token of each row, [N] int64; one below 0 is reported as token 0; in.
        count: how many of the most likely tokens, at most V.

    Returns:
        The report, on the device; fixed shapes, nothing is read back.

    Numerics:
        log_softmax in fp32.
    """
    log_probs = torch.log_softmax(logits.float(), -1)
    own = log_probs.gather(-1, tokens.clamp(min=0).unsqueeze(-1))
    ranks = (log_probs > own).sum(-1, keepdim=True) + 1
    values, ids = torch.topk(log_probs, count, dim=-1)
    return LogprobReport(
        torch.cat((ranks.int(), own.view(torch.int32), ids.int(), values.view(torch.int32)), dim=-1)
    )


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
    ids = torch.tensor(list(tokens), device=logits.device)
    return rank_logprobs(logits, ids, max(counts)).read(tokens, counts, 0)
