"""Log-probabilities of a few tokens per row, in fixed shapes and without a look at values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import Dims, check

__all__ = ["NUM_REPORTED", "LogprobColumns", "report"]

NUM_REPORTED = 20  # most likely tokens of a row


class LogprobColumns(NamedTuple):
    """What `report` found; column 0 is the row's token, then the most likely ones come.

    Attributes:
        ids: [N, 21] int64; -1 where a small vocabulary has no more tokens.
        logprobs: [N, 21] fp32, natural logarithms; -inf where there is no token.
        rank: [N] int32, 1 + the number of tokens more likely than the row's.
    """

    ids: Tensor
    logprobs: Tensor
    rank: Tensor


def report(logits: Tensor, tokens: Tensor) -> LogprobColumns:
    """Report the row's token and the 20 most likely ones; nothing is modified.

        logprob_i = log_softmax(logits)_i

    Args:
        logits: raw scores, [N, V], fp32; in.
        tokens: the token that stands at each row, [N], int64; below 0: token 0 stands in; in.

    Returns:
        Ids, log-probabilities, and the rank of the row's token.

    Raises:
        ValueError: if the shapes disagree.

    Numerics:
        log_softmax in fp32. Which of several equally likely tokens are listed is not said.
    """
    dims: Dims = {}
    check("logits", logits, "N V", dims)
    check("tokens", tokens, "N", dims)
    log_probs = torch.log_softmax(logits, -1)
    own = tokens.clamp(min=0).unsqueeze(-1)
    own_value = log_probs.gather(-1, own)
    rank = (log_probs > own_value).sum(-1, dtype=torch.int32) + 1
    values, ids = torch.topk(log_probs, min(NUM_REPORTED, dims["V"]), dim=-1)
    missing = (0, NUM_REPORTED - ids.shape[1])
    ids = torch.nn.functional.pad(ids, missing, value=-1)
    values = torch.nn.functional.pad(values, missing, value=-torch.inf)
    return LogprobColumns(torch.cat((own, ids), -1), torch.cat((own_value, values), -1), rank)
