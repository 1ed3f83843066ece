"""Sampling data of requests, by slot, on the device of the step.

Columns are written at admission and by the step itself, so a step uploads nothing. What would be
large as [slots, vocab] floats is a bit mask, a row of a pool, or a piece of a flat array.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec.ops._columns import Columns

__all__ = [
    "COUNT_MASK",
    "IN_PROMPT",
    "SamplingTable",
    "SamplingUses",
]

IN_PROMPT = -(2**15)  # the sign bit of a count
COUNT_MASK = 2**15 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingUses:
    """What some row of a batch may need; what is False is not looked at.

    Attributes:
        has_noise: some temperature is above 0.
        has_filters: top_k, top_p or min_p is on somewhere.
        has_counts: some request has penalties.
        has_bias: some request has a logit bias.
        has_words: some request has bad words in the table.
        has_masks: some request may say certain tokens only, or must not end yet.
    """

    has_noise: bool = False
    has_filters: bool = False
    has_counts: bool = False
    has_bias: bool = False
    has_words: bool = False
    has_masks: bool = False

    @classmethod
    def everything(cls) -> SamplingUses:
        """Return that any row may need anything."""
        return cls.of([True] * len(cls.__slots__))

    @classmethod
    def of(cls, flags: Iterable[bool]) -> SamplingUses:
        """Name what `flags` listed."""
        return cls(**dict(zip(cls.__slots__, flags, strict=True)))

    def flags(self) -> list[bool]:
        """List the fields in their order, as the registered op takes them."""
        return [getattr(self, name) for name in self.__slots__]

    @property
    def has_edits(self) -> bool:
        """Whether logits change before temperature and filters."""
        return self.has_counts or self.has_bias or self.has_words or self.has_masks

    def __or__(self, other: SamplingUses) -> SamplingUses:
        """Return what two requests need together."""
        return self.of(a or b for a, b in zip(self.flags(), other.flags(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTable(Columns):
    """Sampling data of S slots and V tokens; bit i of word w of a mask is token 32 w + i.

    Attributes:
        temperature: [S] fp32, 0 = greedy.
        top_k: [S] int32, 0 = off.
        top_p: [S] fp32, 1 = off.
        min_p: [S] fp32, 0 = off.
        seed: [S] int64, of the noise.
        repetition, frequency, presence: [S] fp32, penalties; 1, 0, 0 = off.
        ends_from: [S] int32, first position at which an end token may stand.
        end_bits: [S, ceil(V / 32)] int32, tokens that end the request.
        allowed_bits: [S, ceil(V / 32)] int32, tokens that may be chosen; bits past V are 0.
        count_row: [S] int32, the slot's row of `counts`, -1 = none.
        counts: [P, V] int16, how often the output holds a token, at most COUNT_MASK; the sign bit
            says that the prompt holds it.
        bias_start, bias_len: [S] int32, the slot's piece of the next two.
        bias_tokens: [NB] int32, each token of a piece once.
        bias_values: [NB] fp32.
        word_start, word_len: [S] int32, the slot's piece of `word_bounds`: word_len + 1 of them.
        word_bounds: [NW] int32, where the slot's bad words begin in `word_tokens`, and the end.
        word_tokens: [NT] int32, the words, each of 2 tokens or more.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    ends_from: Tensor
    end_bits: Tensor
    allowed_bits: Tensor
    count_row: Tensor
    counts: Tensor
    bias_start: Tensor
    bias_len: Tensor
    bias_tokens: Tensor
    bias_values: Tensor
    word_start: Tensor
    word_len: Tensor
    word_bounds: Tensor
    word_tokens: Tensor

    @classmethod
    def create(
        cls,
        num_slots: int,
        vocab_size: int,
        *,
        num_count_rows: int = 1,
        num_bias: int = 1,
        num_words: int = 1,
        num_word_tokens: int = 1,
        device: torch.device | str = "cpu",
    ) -> SamplingTable:
        """Allocate a table in which every slot is greedy and has no options.

        Args:
            num_slots: S.
            vocab_size: V.
            num_count_rows: P, slots that can have penalties at a time; at least 1.
            num_bias: NB, entries of logit biases over all slots; at least 1.
            num_words: NW, bad words over all slots, and one more for each slot that has any.
            num_word_tokens: NT, tokens of all bad words.
            device: where the tensors live.

        Returns:
            The table.
        """

        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        floats, ints, num_bits = torch.float32, torch.int32, -(-vocab_size // 32)
        table = cls(
            temperature=full(0, floats, num_slots),
            top_k=full(0, ints, num_slots),
            top_p=full(1, floats, num_slots),
            min_p=full(0, floats, num_slots),
            seed=full(0, torch.int64, num_slots),
            repetition=full(1, floats, num_slots),
            frequency=full(0, floats, num_slots),
            presence=full(0, floats, num_slots),
            ends_from=full(0, ints, num_slots),
            end_bits=full(0, ints, num_slots, num_bits),
            allowed_bits=full(-1, ints, num_slots, num_bits),
            count_row=full(-1, ints, num_slots),
            counts=full(0, torch.int16, num_count_rows, vocab_size),
            bias_start=full(0, ints, num_slots),
            bias_len=full(0, ints, num_slots),
            bias_tokens=full(0, ints, num_bias),
            bias_values=full(0, floats, num_bias),
            word_start=full(0, ints, num_slots),
            word_len=full(0, ints, num_slots),
            word_bounds=full(0, ints, num_words),
            word_tokens=full(0, ints, num_word_tokens),
        )
        if vocab_size % 32:
            table.allowed_bits[:, -1] = 2 ** (vocab_size % 32) - 1
        return table
