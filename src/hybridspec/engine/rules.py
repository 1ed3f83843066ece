"""From a caller's parameters to the sampler's options, checked against the model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hybridspec.config import SamplingParams
from hybridspec.errors import UnsupportedError
from hybridspec.models import Tokenizer
from hybridspec.runtime import SlotOptions

__all__ = ["check_params", "counted_logprobs", "make_options", "seed_of", "word_tokens"]

_SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: seeds of different requests do not meet


def check_params(
    params: SamplingParams, *, vocab_size: int, draft_tokens: int, tokenizer: Tokenizer | None
) -> None:
    """Check parameters against the model and the engine.

    Raises:
        ValueError: if a token is not in the vocabulary, more is asked for than the engine drafts or
            the vocabulary holds, or a text is given without a tokenizer or without `detokenize`.
        UnsupportedError: if the tokenizer cannot leave spaces out.
    """
    if params.stop and not params.detokenize:
        raise ValueError("stop: expected detokenize with it, since it is looked for in the text")
    # Byte-level tokenizers, which know a token's bytes, put no spaces anywhere.
    puts_spaces = tokenizer is not None and tokenizer.token_bytes(0) is None
    if puts_spaces and not params.spaces_between_special_tokens:
        raise UnsupportedError(
            "spaces_between_special_tokens: expected True, this tokenizer puts spaces itself"
        )
    texts = {"stop": params.stop, "bad_words": [w for w in params.bad_words if isinstance(w, str)]}
    for name, given in texts.items():
        if given and tokenizer is None:
            raise ValueError(
                f"{name}: needs a tokenizer.json in the model folder for texts; there is none"
            )
    tokens: dict[str, Sequence[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": list(params.logit_bias or {}),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": [t for word in params.bad_words if not isinstance(word, str) for t in word],
    }
    for name, ids in tokens.items():
        for token in ids:
            if token >= vocab_size:
                raise ValueError(
                    f"{name}: expected ids below the vocabulary size {vocab_size}, got {token}"
                )
    limits = {
        "draft_tokens": (draft_tokens, "the engine's"),
        "logprobs": (vocab_size, "the vocabulary size"),
        "prompt_logprobs": (vocab_size, "the vocabulary size"),
    }
    for name, (limit, what) in limits.items():
        value = getattr(params, name)
        if value is not None and value > limit:
            raise ValueError(f"{name}: expected at most {what} {limit}, got {value}")


def counted_logprobs(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return the parameters with the vocabulary's size in place of logprobs of -1."""
    own, prompt = (
        vocab_size if count == -1 else count for count in (params.logprobs, params.prompt_logprobs)
    )
    return replace(params, logprobs=own, prompt_logprobs=prompt)


def seed_of(seed: int, index: int) -> int:
    """Return the seed of continuation `index`; the first one keeps the request's."""
    return (seed + index * _SEED_STEP) % 2**63


def word_tokens(
    words: Sequence[str | Sequence[int]], tokenizer: Tokenizer | None
) -> list[tuple[int, ...]]:
    """Return the token lists that bad words stand for, each once.

    A text is taken as it stands and, as in the middle of a text, behind one space.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        assert tokenizer is not None  # checked when the request was made
        for text in (word, " " + word.lstrip(" ")):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    found.pop((), None)
    return list(found)


def make_options(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    ends: frozenset[int],
    *,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    seeds: random.Random,
) -> list[SlotOptions]:
    """Return how the tokens of each of the request's continuations are chosen.

    Args:
        params: what the caller set, checked.
        prompt_token_ids: the prompt.
        ends: tokens that end the request.
        vocab_size: number of tokens to choose from.
        tokenizer: for bad words that are texts.
        seeds: where the seed comes from if the parameters name none.

    Raises:
        ValueError: if every token is forbidden.
    """
    words = word_tokens(params.bad_words, tokenizer)
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    forbidden = {word[0] for word in words if len(word) == 1}
    if params.min_tokens:
        forbidden |= ends
    if all(token in forbidden for token in allowed):
        raise ValueError(
            "bad_words, stop_token_ids, allowed_token_ids: expected at least one token that may be "
            "said, got none"
        )
    seed = seeds.getrandbits(63) if params.seed is None else params.seed
    return [
        SlotOptions(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seed_of(seed, index),
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            bias=params.logit_bias or {},
            bad_words=words,
            allowed=params.allowed_token_ids,
            ends=sorted(ends),
            ends_from=len(prompt_token_ids) + params.min_tokens if params.min_tokens else 0,
        )
        for index in range(params.n)
    ]
