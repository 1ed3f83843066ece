"""How one request's tokens are chosen, as plain numbers, and as the sampling table packs them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridspec.ops.sampling import COUNT_MASK, IN_PROMPT, SamplingUses

__all__ = ["SlotOptions", "packed_counts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOptions:
    """How one request's tokens are chosen, as plain numbers and lists.

    Attributes:
        temperature, top_k, top_p, min_p: as in SamplingParams.
        seed: of the noise, in 0..2^63-1.
        repetition, frequency, presence: penalties, as in SamplingParams.
        bias: what is added to the logits of some tokens.
        bad_words: token lists, not empty, whose last token is forbidden behind the others.
        allowed: the only tokens that may be chosen, or None for all.
        ends: tokens that end the request.
        ends_from: first position at which they may stand.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    allowed: Sequence[int] | None = None
    ends: Sequence[int] = ()
    ends_from: int = 0

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties changes anything."""
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)

    @property
    def uses(self) -> SamplingUses:
        """What choosing this request's tokens needs, of what the table can hold."""
        return SamplingUses(
            has_noise=self.temperature > 0,
            has_filters=self.temperature > 0
            and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0),
            has_counts=self.has_penalties,
            has_bias=bool(self.bias),
            has_words=any(len(word) > 1 for word in self.bad_words),
            has_masks=self.allowed is not None
            or (bool(self.ends) and self.ends_from > 0)
            or any(len(word) == 1 for word in self.bad_words),
        )

    def end_bits(self, vocab_size: int) -> array[int]:
        """Bit mask of the tokens that end the request, as the table has it."""
        return _bits(self.ends, vocab_size)

    def allowed_bits(self, vocab_size: int) -> array[int]:
        """Bit mask of the tokens that may be chosen; a bad word of one token never may."""
        allowed = range(vocab_size) if self.allowed is None else self.allowed
        bits = _bits(allowed, vocab_size)
        for word in self.bad_words:
            if len(word) == 1:
                bits[word[0] >> 5] &= ~(1 << (word[0] & 31)) & 0xFFFFFFFF
        return bits


def _bits(tokens: Sequence[int], vocab_size: int) -> array[int]:
    """Bit mask of tokens, [ceil(V / 32)]; what is not in the vocabulary is left out."""
    if isinstance(tokens, range):
        bits = array("I", [0xFFFFFFFF]) * (vocab_size // 32)
        return bits + array("I", [2 ** (vocab_size % 32) - 1] * bool(vocab_size % 32))
    bits = array("I", [0]) * -(-vocab_size // 32)
    for token in tokens:
        if 0 <= token < vocab_size:
            bits[token >> 5] |= 1 << (token & 31)
    return bits


def packed_counts(prompt: Sequence[int], output: Sequence[int]) -> dict[int, int]:
    """Counts of the tokens that a request holds, as the table has them."""
    counts = dict.fromkeys(prompt, IN_PROMPT)
    for token, count in Counter(output).items():
        counts[token] = counts.get(token, 0) + min(count, COUNT_MASK)
    return counts
