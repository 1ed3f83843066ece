"""The definition: how one row chooses its token, in plain Python and fp64."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf

from torch import Tensor

from hybridspec.ops.sampling.gumbel import gumbel_noise
from hybridspec.ops.sampling.table import COUNT_MASK, SamplingTable

__all__ = ["score_row"]


def score_row(
    logits: Tensor, table: SamplingTable, slot: int, tokens: Sequence[int], num_pending: int
) -> list[float]:
    """Score the tokens of one row; `tokens` are all those before it. The best score is chosen."""
    row = {n: c[slot].item() for n in table.__slots__ if (c := getattr(table, n))[slot:].dim() == 1}
    x, position, tokens = logits.tolist(), len(tokens), list(tokens)
    for i in range(row["bias_start"], row["bias_start"] + row["bias_len"]):
        x[table.bias_tokens[i]] += table.bias_values[i].item()
    for i, held in enumerate(table.counts[row["count_row"]].tolist()):
        count = (held & COUNT_MASK) + tokens[position - num_pending :].count(i)
        if row["count_row"] >= 0 and (count or held < 0):
            x[i] = x[i] / row["repetition"] if x[i] > 0 else x[i] * row["repetition"]
            x[i] -= row["frequency"] * count + row["presence"] * (count > 0)
    for i in range(len(x)):
        masks = (table.allowed_bits, table.end_bits)
        is_allowed, is_end = (int(bits[slot, i // 32]) >> i % 32 & 1 for bits in masks)
        if not is_allowed or (is_end and position < row["ends_from"]):
            x[i] = -inf
    for word in range(row["word_start"], row["word_start"] + row["word_len"]):
        first, end = table.word_bounds[word : word + 2].tolist()
        *front, last = table.word_tokens[first:end].tolist()
        x[last] = -inf if ([None] * len(front) + tokens)[-len(front) :] == front else x[last]
    if row["temperature"] == 0 or max(x) == -inf:
        return x
    x = [(value - max(x)) / row["temperature"] for value in x]
    order = sorted(x, reverse=True)
    kept = [value for value in order if value >= order[min(row["top_k"] or len(x), len(x)) - 1]]
    wanted = row["top_p"] * sum(map(exp, kept)) if row["top_p"] < 1 else inf
    noise = gumbel_noise(table.seed[[slot]], table.seed[[0]] * 0 + position, len(x))[0].tolist()
    for i, value in enumerate(x):
        is_kept = value in kept and sum(exp(v) for v in kept if v > value) < wanted
        x[i] = value + noise[i] if is_kept and exp(value) >= row["min_p"] else -inf
    return x
