"""What a caller may set: sampling parameters of a request and options of the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridspec.errors import UnsupportedError

__all__ = ["MAX_DRAFT_TOKENS", "EngineConfig", "SamplingParams"]

MAX_DRAFT_TOKENS = 7  # a verify step takes at most 8 rows of a request


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name}: expected an integer {bound}, got {value}")


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
    output depends on these parameters only, not on drafts, batch or load.

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

    The parameters after these are known by name and not implemented: any other value than the
    neutral one raises UnsupportedError.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 1e6)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: expected at most max_tokens ({self.max_tokens}), "
                f"got {self.min_tokens}"
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop: expected non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos: expected a bool, got {self.ignore_eos!r}")
        neutral: dict[str, tuple[Any, ...]] = {
            "n": (1,),
            "presence_penalty": (0,),
            "frequency_penalty": (0,),
            "repetition_penalty": (1,),
            "logit_bias": (None, {}),
            "logprobs": (None,),
            "prompt_logprobs": (None,),
            "bad_words": (None, [], ()),
        }
        for name, values in neutral.items():
            if getattr(self, name) not in values:
                raise UnsupportedError(
                    f"{name}: not implemented, got {getattr(self, name)!r}; "
                    f"only {values[0]!r} is accepted"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine; "auto" and None are resolved when the model is loaded.

    Attributes:
        draft_tokens: drafts verified per step and request, 0..7; 0 is plain decoding.
        verify_rows: most rows of a verify step over all requests, chosen by the drafter's
            confidence; each running request has one in any case; None verifies every draft.
        dtype: of weights, activations and rings: "auto", "float32", "bfloat16" or "float16".
        state_dtype: of the recurrent state; "auto" follows the checkpoint.
        device: "auto", "cpu", "cuda" or "cuda:N".
        max_model_len: most tokens of a request, prompt included; None is the model's limit.
        memory_fraction: share of the GPU's memory that weights and pools may take.
    """

    draft_tokens: int = 3
    verify_rows: int | None = None
    dtype: str = "auto"
    state_dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    memory_fraction: float = 0.9

    def __post_init__(self) -> None:
        _integer("draft_tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS)
        if self.verify_rows is not None:
            _integer("verify_rows", self.verify_rows, 1)
        for name in ("dtype", "state_dtype"):
            value = getattr(self, name)
            allowed = ("auto", "float32", "bfloat16", "float16")
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
        kind, _, index = str(self.device).partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and not index.isdigit()):
            raise ValueError(
                f'device: expected "auto", "cpu", "cuda" or "cuda:N", got {self.device!r}'
            )
        if self.max_model_len is not None:
            _integer("max_model_len", self.max_model_len, 2)
        _number("memory_fraction", self.memory_fraction, 0.0, 1.0, above_low=True)
