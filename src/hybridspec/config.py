"""Sampling parameters of a request and options of the engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hybridspec.values import (
    check_utf8,
    flag,
    integer,
    listed,
    number,
    optional_integer,
    optional_rates,
    optional_text,
    shown,
)

__all__ = [
    "ATTENTION_BACKENDS",
    "DRAFTERS",
    "DTYPES",
    "EXACTNESS",
    "KV_LAYOUTS",
    "MAX_DRAFT_TOKENS",
    "RINGS",
    "SPECULATION",
    "STATE_DTYPES",
    "EngineConfig",
    "SamplingParams",
]

MAX_DRAFT_TOKENS = 7  # a verify step takes at most 8 rows of a request
MAX_NUM_SEQS = 256
MAX_CONTINUATIONS = 1 << 16  # so that a slip of the keyboard does not fill the memory
DTYPES = ("auto", "float32", "bfloat16", "float16")
STATE_DTYPES = (*DTYPES, "int8")
SPECULATION = ("fixed", "dynamic", "off")
DRAFTERS = ("auto", "mtp", "lookup", "none")
KV_LAYOUTS = ("paged", "contiguous")
ATTENTION_BACKENDS = ("auto", "triton", "fa3", "reference")
EXACTNESS = ("tokens", "bitwise")
RINGS = ("u", "raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    The token at position p is argmax(processed logits + Gumbel noise(seed, p, token)), so the
    output depends on these parameters only, not on drafts, batch or load. Logits are processed in
    this order: logit_bias, repetition_penalty, frequency_penalty, presence_penalty, then what is
    forbidden (bad_words, and the ends before min_tokens), temperature, top_k, top_p, min_p.

    Attributes:
        temperature: 0 is greedy; logits are divided by it otherwise.
        top_k: keep the k most likely tokens; 0 keeps all, and so does -1.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        min_p: drop tokens less likely than min_p times the most likely one; 0 keeps all.
        seed: of the noise, 0..2**63-1; None draws one for the request.
        max_tokens: most tokens to generate; None goes on to the end of the context.
        min_tokens: tokens before which EOS and stop_token_ids cannot be chosen nor `stop` match.
        stop: strings that end the request; the text is cut before them.
        include_stop_str_in_output: whether the text keeps the stop string or token that ended it.
        stop_token_ids: tokens that end the request, besides the model's EOS.
        ignore_eos: go on after the model's EOS.
        n: continuations of the prompt. Continuation i has a seed made from `seed` and i; the first
            one has `seed` itself.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that
            prompt or output hold, 0.01..100; 1 changes nothing.
        frequency_penalty: subtracted from a token's logit for each time that the output holds it.
        presence_penalty: subtracted once if the output holds the token.
        logit_bias: added to the logits of tokens given by id, -100..100 each.
        bad_words: what must not be generated: texts, or lists of token ids. The last token of a
            list is forbidden where the tokens before it, prompt included, are the others. A text
            stands for its tokens at the start of a text and behind a space; spelt with other tokens
            it can still appear.
        allowed_token_ids: the only tokens that may be generated; None allows all.
        logprobs: report each token's log-probability and those of this many most likely ones, of
            the model's own distribution: before everything above; -1 reports all tokens.
        prompt_logprobs: the same for the tokens of the prompt.
        draft_tokens: drafts per step, at most the engine's; None takes the engine's.
        detokenize: whether to make text of the tokens.
        skip_special_tokens: whether the text leaves special tokens out.
        spaces_between_special_tokens: whether tokenizers that space words space these, too.
        truncate_prompt_tokens: keep only so many tokens of the prompt, the last ones; -1 keeps what
            fits the context with max_tokens new ones behind it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    draft_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "temperature": number("temperature", self.temperature, 0.0, 1e6),
            "top_k": max(integer("top_k", self.top_k, -1, 2**31 - 1), 0),
            "top_p": number("top_p", self.top_p, 0.0, 1.0, above_low=True),
            "min_p": number("min_p", self.min_p, 0.0, 1.0),
            "seed": optional_integer("seed", self.seed, 0, 2**63 - 1),
            "max_tokens": optional_integer("max_tokens", self.max_tokens, 1),
            "min_tokens": integer("min_tokens", self.min_tokens, 0),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "n": integer("n", self.n, 1, MAX_CONTINUATIONS),
            "repetition_penalty": number(
                "repetition_penalty", self.repetition_penalty, 0.01, 100.0
            ),
            "frequency_penalty": number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "presence_penalty": number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "logit_bias": _bias(self.logit_bias),
            "bad_words": _words(self.bad_words),
            "allowed_token_ids": _allowed(self.allowed_token_ids),
            "logprobs": optional_integer("logprobs", self.logprobs, -1),
            "prompt_logprobs": optional_integer("prompt_logprobs", self.prompt_logprobs, -1),
            "draft_tokens": optional_integer(
                "draft_tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS
            ),
            "truncate_prompt_tokens": _truncation(self.truncate_prompt_tokens),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                flag(field.name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: expected at most max_tokens ({self.max_tokens}), "
                f"got {shown(self.min_tokens)}"
            )

    def __hash__(self) -> int:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        bias = values.pop("logit_bias")
        return hash((*values.values(), None if bias is None else frozenset(bias.items())))

    def clone(self) -> SamplingParams:
        """Return an equal object that shares nothing which could change."""
        return replace(self)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(integer(name, token, 0) for token in listed(name, value, "token ids"))


def _allowed(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    tokens = _token_ids("allowed_token_ids", value)
    if not tokens:
        raise ValueError("allowed_token_ids: expected at least one token id, got none")
    return tokens


def _truncation(value: Any) -> int | None:
    count = optional_integer("truncate_prompt_tokens", value, -1)
    if count == 0:
        raise ValueError("truncate_prompt_tokens: expected 1 or more, or -1, got 0")
    return count


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else listed("stop", stop, "texts")
    if not all(isinstance(text, str) and text for text in strings):
        raise ValueError(f"stop: expected non-empty strings, got {shown(stop)}")
    check_utf8("stop", strings)
    return strings


def _bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias: expected a dict from token ids to numbers, got {shown(bias)}")
    return {
        integer("logit_bias", token, 0): number("logit_bias", value, -100.0, 100.0)
        for token, value in bias.items()
    } or None


def _words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    if words is None:
        return ()
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise TypeError(
            f"bad_words: expected a list of texts or of token id lists, got {shown(words)}"
        )
    checked: list[str | tuple[int, ...]] = []
    for word in words:
        if isinstance(word, str):
            checked.append(word)
        elif isinstance(word, Iterable) and not isinstance(word, bytes):
            checked.append(_token_ids("bad_words", word))
        else:
            raise TypeError(f"bad_words: expected texts or lists of token ids, got {shown(word)}")
    if not all(checked):
        raise ValueError(
            f"bad_words: expected texts and lists that are not empty, got {shown(words)}"
        )
    check_utf8("bad_words", (word for word in checked if isinstance(word, str)))
    return tuple(checked)


def _words_to_draft(given: Any) -> str | tuple[int, ...] | None:
    """Return a file's name or token ids, checked."""
    if given is None or isinstance(given, str):
        return given
    ids = listed("draft_vocab", given, "token ids")
    return tuple(integer("draft_vocab", token, 0, 2**31 - 1) for token in ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine; "auto" and None are resolved when the model is loaded.

    Attributes:
        draft_tokens: drafts verified per step and request, 0..7; 0 is plain decoding.
        speculation: "fixed" proposes and verifies `draft_tokens` drafts; "dynamic" chooses up to
            that many, for the most tokens per second at the present load and acceptance; "off" is
            plain decoding.
        acceptance: force drafts to be accepted with these probabilities, by position behind the
            newest token, for measurements; the output is synthetic then. None accepts right drafts.
        acceptance_spread: half the width around them within which each draft draws its own.
        verify_rows: most rows of a verify step over all requests, chosen by the drafter's
            confidence; each running request always has one; None verifies every draft.
        drafter: what drafts: "mtp" is the checkpoint's draft head, "lookup" the request's own text,
            "none" nothing; "auto" is "mtp" where there is a head and "lookup" elsewhere.
        mtp_from: model to take the draft head from, in place of the checkpoint's own.
        draft_vocab: tokens that the draft head chooses from: their ids, a JSON file of them, or a
            text whose most frequent tokens are taken; None is all.
        dummy_weights: whether to use random weights, from config.json alone.
        dtype: of weights, activations and rings: "auto", "float32", "bfloat16" or "float16".
        state_dtype: of the recurrent state, in addition "int8" (`docs/kernels/gdn_8bit.md`); "auto"
            follows the checkpoint. Dtypes below float32 are rounded once per fold, and plain and
            speculative decoding fold at different tokens, so they may differ at near-ties.
        ring: what rings keep of the tokens since a fold: "u", corrections, or "raw", keys, values
            and gates as they came (`docs/kernels/gdn_raw.md`); not with an int8 state.
        device: "auto", "cpu", "cuda" or "cuda:N".
        max_model_len: most tokens of a request, prompt included; None is the model's limit.
        memory_fraction: share of the GPU's memory that weights and pools may take.
        kv_layout: "paged" hands keys and values out in pages as requests need them; "contiguous"
            gives each slot one page of max_model_len tokens, as FlashAttention-3 wants it.
        attention_backend: attention of verify steps: "auto", "triton", "fa3" or "reference".
        threads: torch's CPU threads during a step, at most one for each core; None is 1 for models
            of small matrices, which more threads slow down, and torch's own number for others.
        max_num_seqs: most requests that run at the same time; None is 64 on a CPU, 256 on a GPU.
        max_num_batched_tokens: most prompt rows of a forward pass, over all requests; None is 2,048
            on a CPU and 8,192 on a GPU.
        enable_prefix_caching: whether prompts reuse what was computed for others with their prefix;
            None does. Never with kv_layout "contiguous". With exact "bitwise" only what ends where
            chunks end is reused.
        prefix_states: number of prefixes whose recurrent states are kept; each takes as much memory
            as a request without its keys and values. None is 64, or fewer where memory is short.
        enforce_eager: whether to run every step on a GPU operator by operator, without CUDA graphs.
        capture_prompts: whether to capture forwards of prompt rows as CUDA graphs too, in chunks of
            512 rows; None does on a GPU where their kernels are there (16 bits, fla-core) and exact
            is "tokens".
        exact: what drafts, batch and load must not change: "tokens", up to near-ties that rounding
            decides, or "bitwise", every logit (`docs/exactness.md`).
        revision: of a model on the hub: branch, tag or commit.
        tokenizer: model to take tokenizer and chat template from, in place of the model's own.
        seed: source of the seeds of requests that name none; the same requests in the same order
            then give the same tokens. None draws them.
    """

    draft_tokens: int = 3
    speculation: str = "fixed"
    verify_rows: int | None = None
    acceptance: tuple[float, ...] | None = None
    acceptance_spread: float = 0.0
    drafter: str = "auto"
    mtp_from: str | None = None
    draft_vocab: str | tuple[int, ...] | None = None
    dummy_weights: bool = False
    dtype: str = "auto"
    state_dtype: str = "auto"
    ring: str = "u"
    device: str = "auto"
    max_model_len: int | None = None
    memory_fraction: float = 0.9
    kv_layout: str = "paged"
    attention_backend: str = "auto"
    threads: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool | None = None
    prefix_states: int | None = None
    enforce_eager: bool = False
    capture_prompts: bool | None = None
    exact: str = "tokens"
    revision: str | None = None
    tokenizer: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "draft_tokens": integer("draft_tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS),
            "verify_rows": optional_integer("verify_rows", self.verify_rows, 1),
            "acceptance": optional_rates("acceptance", self.acceptance),
            "draft_vocab": _words_to_draft(self.draft_vocab),
            "acceptance_spread": number("acceptance_spread", self.acceptance_spread, 0.0, 1.0),
            "max_model_len": optional_integer("max_model_len", self.max_model_len, 2),
            "memory_fraction": number(
                "memory_fraction", self.memory_fraction, 0.0, 1.0, above_low=True
            ),
            "threads": optional_integer("threads", self.threads, 1, 1024),
            "max_num_seqs": optional_integer("max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS),
            "max_num_batched_tokens": optional_integer(
                "max_num_batched_tokens", self.max_num_batched_tokens, 1
            ),
            "seed": optional_integer("seed", self.seed, 0, 2**63 - 1),
            "prefix_states": optional_integer("prefix_states", self.prefix_states, 1),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        for name, allowed in (
            ("speculation", SPECULATION),
            ("dtype", DTYPES),
            ("state_dtype", STATE_DTYPES),
            ("ring", RINGS),
            ("drafter", DRAFTERS),
            ("kv_layout", KV_LAYOUTS),
            ("attention_backend", ATTENTION_BACKENDS),
            ("exact", EXACTNESS),
        ):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise ValueError(
                    f"{name}: expected one of {', '.join(allowed)}, got {shown(value)}"
                )
        if self.acceptance_spread and self.acceptance is None:
            raise ValueError("acceptance_spread: expected acceptance with it, got none")
        if self.speculation == "off":
            object.__setattr__(self, "draft_tokens", 0)
        flag("dummy_weights", self.dummy_weights)
        flag("enforce_eager", self.enforce_eager)
        for name in ("enable_prefix_caching", "capture_prompts"):
            if getattr(self, name) is not None:
                flag(name, getattr(self, name))
        for name in ("mtp_from", "revision", "tokenizer"):
            optional_text(name, getattr(self, name))
        self._check_head_options()
        is_text = isinstance(self.device, str)
        if not is_text or not re.fullmatch("auto|cpu|cuda(:[0-9]{1,4})?", self.device):
            raise ValueError(
                f'device: expected "auto", "cpu", "cuda" or "cuda:N", got {shown(self.device)}'
            )

    @property
    def is_dynamic(self) -> bool:
        """Whether a policy sizes the steps."""
        return self.speculation == "dynamic" and self.draft_tokens > 0

    @property
    def needs_confidences(self) -> bool:
        """Whether the drafter has to say how sure it is."""
        return self.is_dynamic or self.verify_rows is not None

    def _check_head_options(self) -> None:
        """Refuse what is about a draft head where none drafts."""
        for name in ("mtp_from", "draft_vocab"):
            if getattr(self, name) is not None and self.drafter not in ("auto", "mtp"):
                raise ValueError(f"{name}: expected drafter 'mtp' with it, got {self.drafter!r}")
        if self.mtp_from is not None and self.dummy_weights:
            raise ValueError("mtp_from: expected no dummy_weights with it, got both")
