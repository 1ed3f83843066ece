"""What a request's own words do to its logits: bias, penalties, bad words.

Each is a function of the request's parameters and of the tokens before the row, drafts included, so
a row that verifies a draft sees what plain decoding would have seen there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["LogitEdits", "edit_logits"]


class LogitEdits:
    """The options of one request and the tokens that they look at.

    Args:
        prompt_token_ids: the prompt.
        repetition, frequency, presence: penalties, as in SamplingParams.
        bias: what to add to the logits of some tokens.
        bad_words: token lists whose last token is forbidden behind the others.

    Attributes:
        tokens: prompt and output so far; `extend` adds to them.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        repetition: float = 1.0,
        frequency: float = 0.0,
        presence: float = 0.0,
        bias: Mapping[int, float] | None = None,
        bad_words: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.repetition, self.frequency, self.presence = repetition, frequency, presence
        self.bias = dict(bias or {})
        self.tokens = list(prompt_token_ids)
        # By the length of what stands before a word's last token: that, and the last tokens.
        self._words: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *before, last in bad_words:
            self._words.setdefault(len(before), {}).setdefault(tuple(before), []).append(last)
        self._num_prompt = self._num_counted = len(self.tokens)
        self._in_prompt: Tensor | None = None
        self._counts: Tensor | None = None
        self._bias_tensors: tuple[Tensor, Tensor] | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties changes anything."""
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that were generated."""
        self.tokens.extend(tokens)

    def forbidden_after(self, pending: Sequence[int]) -> list[int]:
        """Return the last tokens of the bad words that `tokens` and `pending` have begun."""
        if not self._words:
            return []
        reach = max(self._words)
        tail = (*self.tokens[max(len(self.tokens) - reach, 0) :], *pending)
        return [
            token
            for size, words in self._words.items()
            for token in words.get(tail[len(tail) - size :] if size <= len(tail) else (), ())
        ]

    def counts(self, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return which tokens the prompt holds, [V] bool, and how often the output does, [V] fp32.

        Both are kept between steps; only tokens that are new since the last call are counted.
        """
        if self._in_prompt is None or self._counts is None:
            self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._in_prompt[torch.tensor(self.tokens[: self._num_prompt], device=device)] = True
            self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        if new := self.tokens[self._num_counted :]:
            ids = torch.tensor(new, device=device)
            self._counts.index_add_(
                0, ids, torch.ones(len(new), dtype=torch.float32, device=device)
            )
            self._num_counted = len(self.tokens)
        return self._in_prompt, self._counts

    def add_bias(self, row: Tensor) -> None:
        """Add the bias to one row of logits, [V], in place."""
        if self._bias_tensors is None:
            self._bias_tensors = (
                torch.tensor(list(self.bias), device=row.device),
                torch.tensor(list(self.bias.values()), dtype=row.dtype, device=row.device),
            )
        row.index_add_(0, *self._bias_tensors)


def edit_logits(
    logits: Tensor, edits: Sequence[LogitEdits | None], pending: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Apply bias and penalties in place, and find what bad words forbid.

        x = logit + bias
        x = x / repetition if x > 0 else x * repetition      for tokens of prompt and output
        x = x - frequency * count - presence * [count > 0]   count: how often the output holds it

    Args:
        logits: [N, V], fp32; in-out, only rows with edits.
        edits: the options of each row's request, or None, N of them.
        pending: tokens between the last one that the request has taken in and the row, N of them.

    Returns:
        (row, token) of each forbidden pair.

    Numerics:
        fp32, one rounding per operation; a row's result does not depend on the other rows.
    """
    forbidden = []
    penalised = []
    for row, mine in enumerate(edits):
        if mine is None:
            continue
        if mine.bias:
            mine.add_bias(logits[row])
        if mine.has_penalties:
            penalised.append(row)
        forbidden += [(row, token) for token in mine.forbidden_after(pending[row])]
    if penalised:
        _penalise(logits, penalised, edits, pending)
    return forbidden


def _penalise(
    logits: Tensor,
    rows: Sequence[int],
    edits: Sequence[LogitEdits | None],
    pending: Sequence[Sequence[int]],
) -> None:
    device = logits.device
    mine = [one for row in rows if (one := edits[row]) is not None]
    each = [one.counts(logits.shape[-1], device) for one in mine]
    counts = torch.stack([counted for _, counted in each])
    ahead = [(i, token) for i, row in enumerate(rows) for token in pending[row]]
    if ahead:
        index = torch.tensor(ahead, device=device).unbind(-1)
        counts.index_put_(index, counts.new_ones(()), accumulate=True)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(-1)

    index_of_rows = torch.tensor(list(rows), device=device)
    x = logits[index_of_rows]
    is_said = counts > 0
    repetition = column([one.repetition for one in mine])
    is_seen = is_said | torch.stack([in_prompt for in_prompt, _ in each])
    x = torch.where(is_seen, torch.where(x > 0, x / repetition, x * repetition), x)
    # Two roundings, and no fused multiply-add whose use could depend on a row's place in the batch.
    x = x - column([one.frequency for one in mine]) * counts
    x = x - column([one.presence for one in mine]) * is_said
    logits[index_of_rows] = x
