"""The fields of requests: their types, and their meaning for the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from hybridspec.config import SamplingParams
from hybridspec.serve.errors import ApiError, wrong_call

__all__ = [
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "Limits",
    "TokenizeBody",
    "note_unknown",
    "sampling_params",
]

_log = logging.getLogger("hybridspec.serve")
_PARAMETERS = {field.name for field in fields(SamplingParams)}
# Fields that change the output of servers which have them; here only these values are served.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "functions": (None,),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "documents": (None,),
    "logits_processors": (None, []),
    "thinking_token_budget": (None,),
    "prompt_embeds": (None,),
}
# They change nothing of the output; others are logged once.
_SILENT = {
    "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "user",
    "priority", "prompt_cache_retention", "prediction", "verbosity", "request_id", "cache_salt",
    "reasoning_effort", "moderation",
}  # fmt: skip
_seen_unknown: set[str] = set()
_MAX_UNKNOWN = 1000  # names that are remembered

# Options of the interface that SamplingParams calls by the same name.
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "n", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "bad_words", "allowed_token_ids", "prompt_logprobs", "draft_tokens",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
)  # fmt: skip

Item = TypeVar("Item")
# A list whose first wrong entry is told: an error for each of millions would stop the event loop.
Entries = Annotated[list[Item], Field(fail_fast=True)]


class Limits(BaseModel):
    """What a request may ask for at most."""

    model_config = ConfigDict(frozen=True)

    n: int = 16
    prompts: int = 64
    top_logprobs: int = 20
    body_bytes: int = 8 << 20
    allowed_token_ids: int = 1 << 18  # vocabularies of these models have fewer
    # Entries of lists that each step or token looks through.
    stop: int = 32
    stop_chars: int = 1024  # of each
    stop_token_ids: int = 1024
    bad_words: int = 1024
    logit_bias: int = 8192


class StreamOptions(BaseModel):
    """What a stream tells besides its text."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(BaseModel):
    """Fields that completions and chats share."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Entries[str] | None = None
    stop_token_ids: Entries[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None  # its numbers are checked by SamplingParams
    bad_words: Entries[str] | None = None
    allowed_token_ids: Entries[int] | None = None
    prompt_logprobs: int | None = None
    draft_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_speculation: bool = False


class CompletionBody(_Body):
    """A request to continue prompts."""

    prompt: str | Entries[str] | Entries[int] | Entries[Entries[int]]
    echo: bool = False
    logprobs: int | None = None


class ChatBody(_Body):
    """A request to answer a conversation."""

    messages: Entries[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Entries[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True


class TokenizeBody(BaseModel):
    """A request for the tokens of a text or a conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Entries[dict[str, Any]] | None = None
    tools: Entries[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    """A request for the text of tokens."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    tokens: Entries[int]


def note_unknown(body: BaseModel) -> None:
    """Refuse fields that would change the output and are not served; log unknown ones once."""
    for name, value in (body.model_extra or {}).items():
        if name in _NEUTRAL:
            if not any(value == neutral for neutral in _NEUTRAL[name]):
                raise ApiError(400, f"{name}: not supported", param=name, code="unsupported_field")
        elif (
            name not in _SILENT and name not in _seen_unknown and len(_seen_unknown) < _MAX_UNKNOWN
        ):
            _seen_unknown.add(name)
            _log.warning("requests have an unknown field %.100r, which is ignored", name)


def sampling_params(
    body: CompletionBody | ChatBody, defaults: SamplingParams, limits: Limits
) -> SamplingParams:
    """Return the engine's parameters for a request.

    Args:
        body: its fields, checked for type.
        defaults: what the checkpoint recommends.
        limits: what it may ask for.

    Raises:
        ApiError: if a value is out of range or not served.
    """
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if isinstance(body, CompletionBody):
        given["max_tokens"] = 16 if body.max_tokens is None else body.max_tokens
        given["logprobs"] = body.logprobs
        if body.echo:
            given["max_tokens"] = max(given["max_tokens"], 1)  # what is too much is left out
            given["prompt_logprobs"] = body.logprobs
    else:
        either = body.max_completion_tokens
        given["max_tokens"] = body.max_tokens if either is None else either
        given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: expected logprobs with it", param="top_logprobs")
    if body.logit_bias:
        given["logit_bias"] = _bias(body.logit_bias)
    for name, limit in (("n", limits.n), ("logprobs", limits.top_logprobs),
                        ("prompt_logprobs", limits.top_logprobs)):  # fmt: skip
        value = given.get(name)
        if value is not None and not 0 <= value <= limit:
            if name == "logprobs" and isinstance(body, ChatBody):
                name = "top_logprobs"
            wanted = f"at most {limit}" if value > limit else "0 or more"
            raise ApiError(400, f"{name}: expected {wanted}, got {value}", param=name)
    for name in ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids"):
        value, most = given.get(name), getattr(limits, name)
        if value is not None and not isinstance(value, str) and len(value) > most:
            raise ApiError(400, f"{name}: expected at most {most} entries", param=name)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or ()
    if any(len(stop) > limits.stop_chars for stop in stops):
        message = f"stop: expected at most {limits.stop_chars} characters each"
        raise ApiError(400, message, param="stop")
    try:
        return replace(defaults, **given)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise wrong_call(error) from None


def _bias(given: Mapping[str, Any]) -> dict[int, Any]:
    bias = {}
    for token, value in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > 9:
            message = f"logit_bias: expected token ids as keys, got {token[:40]!r}"
            raise ApiError(400, message, param="logit_bias")
        bias[int(token)] = value
    return bias
