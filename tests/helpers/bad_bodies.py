"""Requests that no server can answer, made from right ones."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

__all__ = ["bad_requests"]

_COMPLETION: dict[str, Any] = {"model": "small", "prompt": "a", "max_tokens": 1}
_CHAT: dict[str, Any] = {
    "model": "small", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1
}  # fmt: skip
_RIGHT = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/tokenize": {"model": "small", "prompt": "a"},
    "/detokenize": {"model": "small", "tokens": [1]},
}
# Values that a field of none of these types takes.
_NOT_NUMBERS: list[Any] = ["1", [], {}, [1], "\ud800", True]
_NOT_TEXTS: list[Any] = [{}, {"a": []}, 1.5, False]
_NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "n",
    "repetition_penalty", "frequency_penalty", "presence_penalty", "truncate_prompt_tokens",
    "prompt_logprobs", "draft_tokens",
)  # fmt: skip
_OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [-1, 1e300, 10**400],
    "top_p": [0, 2, -0.5],
    "top_k": [-2, 2**40, 0.5],
    "min_p": [-1, 3],
    "seed": [-1, 2**70, 0.5],
    "max_tokens": [-1, 0.5, -(10**30)],
    "min_tokens": [-1, 500],
    "n": [0, -1, 1000, 10**30, 1.5],
    "repetition_penalty": [0, -1, 1e9],
    "frequency_penalty": [-3, 3],
    "presence_penalty": [-3, 3],
    "truncate_prompt_tokens": [0, -5],
    "prompt_logprobs": [-2, 99],
    "draft_tokens": [-1, 8],
}


def _changed(rng: random.Random, path: str, right: dict[str, Any]) -> dict[str, Any]:
    body = copy.deepcopy(right)
    content = next(key for key in ("prompt", "messages", "tokens") if key in body)
    kind = rng.randrange(6)
    if kind == 0:
        body.pop(content)
    elif kind == 1:
        body[content] = rng.choice([None, {}, 3, True, [None], [[[1]]], [{}], [1.5], "\ud800"])
        if content == "tokens" and body[content] == "\ud800":
            body[content] = "abc"
    elif kind == 2:
        body["model"] = rng.choice([3, [], {}, "other", "", "small/../small", "x" * 5000])
    elif path in ("/tokenize", "/detokenize"):
        body = {"model": "small", content: rng.choice([{}, 7, [[]], [{"a": 1}]])}
    elif kind == 3:
        body[rng.choice(_NUMBERS)] = rng.choice(_NOT_NUMBERS)
    elif kind == 4:
        name = rng.choice(list(_OUT_OF_RANGE))
        body[name] = rng.choice(_OUT_OF_RANGE[name])
    else:
        body |= rng.choice(
            [
                {"stop": 3}, {"stop": [""]}, {"stop": [1]}, {"stop_token_ids": ["a"]},
                {"stop_token_ids": [-1]}, {"stop_token_ids": [10**6]}, {"logit_bias": [1]},
                {"logit_bias": {"a": 1}}, {"logit_bias": {"1": 101}}, {"logit_bias": {"1": "x"}},
                {"logit_bias": {"999999": 1}}, {"bad_words": [""]}, {"bad_words": "a"},
                {"stream": "yes"}, {"stream_options": 3}, {"ignore_eos": "no"},
                {"best_of": 3}, {"structured_outputs": {"json": {}}}, {"use_beam_search": True},
                {"response_format": {"type": "json_object"}}, {"allowed_token_ids": []},
                {"logprobs": "all"}, {"guided_regex": "a"}, {"functions": [{}]},
            ]
        )  # fmt: skip
    return body


def bad_requests(seed: int, count: int) -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    """Yield method, path, body and headers of requests that deserve a 4xx."""
    rng = random.Random(seed)
    for _ in range(count):
        path = rng.choice(list(_RIGHT))
        method, headers = "POST", {"Content-Type": "application/json"}
        text = json.dumps(_changed(rng, path, _RIGHT[path])).encode()
        kind = rng.randrange(12)
        if kind == 0:
            text = text[: rng.randrange(len(text))]
        elif kind == 1:
            text = bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
        elif kind == 2:
            text = rng.choice([b"[" * 100_000, b"null", b'"a"', b"NaN", b"1e999", b"[1]", b""])
        elif kind == 3:
            headers["Content-Type"] = rng.choice(["text/plain", "", "multipart/form-data", "a/b"])
        elif kind == 4:
            method = rng.choice(["GET", "PUT", "DELETE", "PATCH"])
        elif kind == 5:
            path = rng.choice(["/v1", "/v2/completions", "/v1/completions/x", "/%00", "/..%2f.."])
        yield method, path, text, headers
