"""What a caller may set: sampling parameters of a request and options of the engine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ATTENTION_BACKENDS",
    "DRAFTERS",
    "DTYPES",
    "KV_LAYOUTS",
    "MAX_DRAFT_TOKENS",
    "STATE_DTYPES",
    "EngineConfig",
    "SamplingParams",
]

MAX_DRAFT_TOKENS = 7  # a verify step takes at most 8 rows of a request
MAX_CONTINUATIONS = 1 << 16  # so that a slip of the keyboard does not fill the memory
DTYPES = ("auto", "float32", "bfloat16", "float16")
STATE_DTYPES = (*DTYPES, "int8")
DRAFTERS = ("auto", "mtp", "lookup", "none")
KV_LAYOUTS = ("paged", "contiguous")
ATTENTION_BACKENDS = ("auto", "triton", "fa3", "reference")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name}: expected an integer {bound}, got {value}")


def _optional_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if value is not None:
        _integer(name, value, low, high)


def _number(name: str, value: Any, low: float, high: float, *, above_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not math.isfinite(value) or value > high or value < low or (above_low and value == low):
        opening = "(" if above_low else "["
        raise ValueError(f"{name}: expected a number in {opening}{low:g}, {high:g}], got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    The token at position p is argmax(processed logits + Gumbel noise(seed, p, token)), so the
    output depends on these parameters only, not on drafts, batch or load. Logits are processed in
    this order: logit_bias, repetition_penalty, frequency_penalty, presence_penalty, then what is
    forbidden (bad_words, and the ends before min_tokens), temperature, top_k, top_p, min_p.

    Attributes:
        temperature: 0 is greedy; logits are divided by it otherwise.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        min_p: drop tokens less likely than min_p times the most likely one; 0 keeps all.
        seed: of the noise, 0..2**63-1; None draws one for the request.
        max_tokens: most tokens to generate; None goes on to the end of the context.
        min_tokens: tokens before which EOS and stop_token_ids cannot be chosen nor `stop` match.
        stop: strings that end the request; the text is cut before them.
        stop_token_ids: tokens that end the request, besides the model's EOS.
        ignore_eos: go on after the model's EOS.
        n: continuations of the prompt. Continuation i has a seed made from `seed` and i; the first
            one has `seed` itself.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that
            prompt or output hold; 1 changes nothing.
        frequency_penalty: subtracted from a token's logit for each time that the output holds it.
        presence_penalty: subtracted once if the output holds the token.
        logit_bias: added to the logits of tokens given by id, -100..100 each.
        bad_words: what must not be said: texts, or lists of token ids. The last token of such a
            list is forbidden where the tokens before it, prompt included, are the others. A text
            stands for its tokens as they are at the start of a text and behind a space; spelt with
            other tokens it can still appear.
        logprobs: report each token's log-probability and those of this many most likely ones, of
            the model's own distribution: before everything above.
        prompt_logprobs: the same for the tokens of the prompt.
        draft_tokens: drafts per step, at most the engine's; None takes the engine's.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 1e6)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _optional_integer("seed", self.seed, 0, 2**63 - 1)
        _optional_integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: expected at most max_tokens ({self.max_tokens}), "
                f"got {self.min_tokens}"
            )
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(
            self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids, "token ids")
        )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos: expected a bool, got {self.ignore_eos!r}")
        _integer("n", self.n, 1, MAX_CONTINUATIONS)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above_low=True)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _words(self.bad_words))
        _optional_integer("logprobs", self.logprobs, 0)
        _optional_integer("prompt_logprobs", self.prompt_logprobs, 0)
        _optional_integer("draft_tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS)


def _listed(name: str, value: Any, what: str) -> tuple[Any, ...]:
    """Return a list as a tuple, an empty one for None."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected a list of {what}, got {value!r}")
    return tuple(value)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _listed("stop", stop, "texts")
    if not all(isinstance(text, str) and text for text in strings):
        raise ValueError(f"stop: expected non-empty strings, got {stop!r}")
    return strings


def _bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias: expected a dict from token ids to numbers, got {bias!r}")
    for token, value in bias.items():
        _integer("logit_bias", token, 0)
        _number("logit_bias", value, -100.0, 100.0)
    return dict(bias) or None


def _words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    if words is None:
        return ()
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise TypeError(f"bad_words: expected a list of texts or of token id lists, got {words!r}")
    checked: list[str | tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            if not isinstance(word, Sequence):
                raise TypeError(f"bad_words: expected texts or lists of token ids, got {word!r}")
            for token in word:
                _integer("bad_words", token, 0)
        if not word:
            raise ValueError(
                f"bad_words: expected texts and lists that are not empty, got {words!r}"
            )
        checked.append(word if isinstance(word, str) else tuple(word))
    return tuple(checked)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine; "auto" and None are resolved when the model is loaded.

    Attributes:
        draft_tokens: drafts verified per step and request, 0..7; 0 is plain decoding.
        verify_rows: most rows of a verify step over all requests, chosen by the drafter's
            confidence; each running request has one in any case; None verifies every draft.
        drafter: what drafts: "mtp" is the checkpoint's draft head, "lookup" the request's own text,
            "none" nothing; "auto" is "mtp" where there is a head and "lookup" elsewhere.
        mtp_from: model to take the draft head from, in place of the checkpoint's own.
        dummy_weights: whether to make the weights up, from config.json alone.
        dtype: of weights, activations and rings: "auto", "float32", "bfloat16" or "float16".
        state_dtype: of the recurrent state, in addition "int8" (`docs/kernels/gdn_8bit.md`); "auto"
            follows the checkpoint. What is not float32 is rounded once per fold, and plain and
            speculative decoding fold at different tokens, so they may differ at near-ties.
        device: "auto", "cpu", "cuda" or "cuda:N".
        max_model_len: most tokens of a request, prompt included; None is the model's limit.
        memory_fraction: share of the GPU's memory that weights and pools may take.
        kv_layout: "paged" hands keys and values out in pages as requests need them; "contiguous"
            gives each slot one page of max_model_len tokens, as FlashAttention-3 wants it.
        attention_backend: what attends in verify steps: "auto", "triton", "fa3" or "reference".
        threads: torch's CPU threads during a step; None is 1 for models of small matrices, which
            more threads slow down, and torch's own number for others.
    """

    draft_tokens: int = 3
    verify_rows: int | None = None
    drafter: str = "auto"
    mtp_from: str | None = None
    dummy_weights: bool = False
    dtype: str = "auto"
    state_dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    memory_fraction: float = 0.9
    kv_layout: str = "paged"
    attention_backend: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        _integer("draft_tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS)
        if self.verify_rows is not None:
            _integer("verify_rows", self.verify_rows, 1)
        for name, allowed in (
            ("dtype", DTYPES),
            ("state_dtype", STATE_DTYPES),
            ("drafter", DRAFTERS),
            ("kv_layout", KV_LAYOUTS),
            ("attention_backend", ATTENTION_BACKENDS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
        if self.mtp_from is not None:
            if not isinstance(self.mtp_from, str):
                raise TypeError(f"mtp_from: expected a text, got {self.mtp_from!r}")
            if not self.mtp_from:
                raise ValueError("mtp_from: expected a folder or an id, got an empty text")
            if self.drafter not in ("auto", "mtp"):
                raise ValueError(f"mtp_from: expected drafter 'mtp' with it, got {self.drafter!r}")
            if self.dummy_weights:
                raise ValueError("mtp_from: expected no dummy_weights with it, got both")
        if not isinstance(self.dummy_weights, bool):
            raise TypeError(f"dummy_weights: expected a bool, got {self.dummy_weights!r}")
        is_text = isinstance(self.device, str)
        if not is_text or not re.fullmatch("auto|cpu|cuda(:[0-9]+)?", self.device):
            raise ValueError(
                f'device: expected "auto", "cpu", "cuda" or "cuda:N", got {self.device!r}'
            )
        if self.max_model_len is not None:
            _integer("max_model_len", self.max_model_len, 2)
        _number("memory_fraction", self.memory_fraction, 0.0, 1.0, above_low=True)
        if self.threads is not None:
            _integer("threads", self.threads, 1, 1024)
