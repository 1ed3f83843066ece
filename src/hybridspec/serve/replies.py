"""Replies to a client: chunks of a stream, or the whole answer at the end."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridspec.engine import CompletionOutput, RequestStats, StepOutput
from hybridspec.engine.request import Request
from hybridspec.models import Tokenizer
from hybridspec.serve.errors import ApiError
from hybridspec.serve.fields import ChatBody, CompletionBody
from hybridspec.serve.parser import OutputParser
from hybridspec.speculate import TokenLogprobs

__all__ = [
    "ChatMessage",
    "Head",
    "Marks",
    "chat_logprobs",
    "check_error",
    "completion_logprobs",
    "usage_of",
]


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer begins with."""

    id: str
    object: str
    created: int
    model: str
    is_synthetic: bool = False  # drafts are accepted by force

    @classmethod
    def new(cls, prefix: str, kind: str, model: str, *, is_synthetic: bool) -> Head:
        number = f"{prefix}-{uuid.uuid4().hex}"
        return cls(number, kind, int(time.time()), model, is_synthetic)

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        if self.is_synthetic:
            more["system_fingerprint"] = "synthetic-acceptance"
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def check_error(output: CompletionOutput | None) -> None:
    """Raise what the client is told where the logits held NaN."""
    if output is not None and output.error is not None:
        raise ApiError(500, output.error, code="model_error")


def usage_of(requests: Sequence[Request], body: CompletionBody | ChatBody) -> dict[str, Any]:
    """Count the tokens of an answer, and what was drafted for it if the client asks."""
    every = [one for request in requests for one in request.continuations]
    num_prompt = sum(len(request.prompt_token_ids) for request in requests)
    # Where the client wants no token, the one that was chosen is left out of the answer.
    num_new = 0 if body.max_tokens == 0 else sum(one.num_generated for one in every)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }
    if body.return_speculation:
        usage["speculation"] = _speculation([one.stats for one in every])
    return usage


def _speculation(stats: Sequence[RequestStats]) -> dict[str, int]:
    return {
        "verify_steps": sum(len(one.committed_per_step) for one in stats),
        "committed_tokens": sum(sum(one.committed_per_step) for one in stats),
        "drafted_tokens": sum(sum(one.drafted_per_step) for one in stats),
        "accepted_tokens": sum(sum(one.accepted_per_step) for one in stats),
        "folds": sum(one.folds for one in stats),
    }


class Marks:
    """Says of a continuation's text which piece of it came from where."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = tokenizer.detokenizer()

    def of(self, step: StepOutput) -> dict[str, Any]:
        pieces = [
            [self._detokenizer.push([token]), origin]
            for token, origin in zip(step.token_ids, step.origins, strict=True)
        ]
        return {
            "step": step.step,
            "drafted": len(step.drafted),
            "accepted": step.origins.count("accepted"),
            "is_fold": step.is_fold,
            "pieces": pieces,
        }


def completion_logprobs(
    token_ids: Sequence[int],
    reports: Sequence[TokenLogprobs | None] | None,
    tokenizer: Tokenizer,
    start: int = 0,
) -> dict[str, Any] | None:
    """Return log-probabilities in the form of completions.

    Args:
        token_ids: the tokens.
        reports: their log-probabilities; None for a prompt's first token.
        tokenizer: names that one; one that begins every text has no name, as it is in no text.
        start: characters of the tokens before them.
    """
    if reports is None:
        return None
    texts: list[str] = []
    offsets: list[int] = []
    for token, report in zip(token_ids, reports, strict=True):
        texts.append(tokenizer.decode([token]) if report is None else _name(report, token))
        offsets.append(start)
        start += len(texts[-1])
    pairs = list(zip(token_ids, reports, strict=True))
    return {
        "tokens": texts,
        "token_logprobs": [None if r is None else r[token].logprob for token, r in pairs],
        "top_logprobs": [
            None if r is None else {_name(r, other): one.logprob for other, one in r.items()}
            for r in reports
        ],
        "text_offset": offsets,
    }


def chat_logprobs(
    token_ids: Sequence[int],
    reports: Sequence[TokenLogprobs] | None,
    count: int,
    tokenizer: Tokenizer,
) -> dict[str, Any] | None:
    """Return log-probabilities in the form of chats, the `count` likeliest tokens of each place."""
    if reports is None:
        return None

    def entry(report: TokenLogprobs, token: int) -> dict[str, Any]:
        text = _name(report, token)
        raw = tokenizer.token_bytes(token, skip_special_tokens=False)
        return {
            "token": text,
            "logprob": report[token].logprob,
            "bytes": list(text.encode() if raw is None else raw),
        }

    content = []
    for token, report in zip(token_ids, reports, strict=True):
        likeliest = [other for other, one in report.items() if one.rank <= count]
        likeliest.sort(key=lambda other: report[other].rank)
        top = [entry(report, other) for other in likeliest[:count]]
        content.append({**entry(report, token), "top_logprobs": top})
    return {"content": content}


def _name(report: TokenLogprobs, token: int) -> str:
    text = report[token].decoded_token
    return f"token_id:{token}" if text is None else text


class ChatMessage:
    """Builds the message, or its deltas, of one continuation.

    Args:
        parser: tells its parts apart.
        has_reasoning: whether the client wants reasoning.
    """

    def __init__(self, parser: OutputParser, *, has_reasoning: bool) -> None:
        self._parser = parser
        self._has_reasoning = has_reasoning
        self._calls: list[dict[str, Any]] = []
        self._parts: dict[str, list[str]] = {"reasoning": [], "content": []}

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def deltas(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """Take more text and return the deltas that it makes, neighbours of a kind joined."""
        events = self._parser.push(text)
        if is_last:
            events += self._parser.finish()
        deltas: list[dict[str, Any]] = []
        for kind, piece in events:
            if kind in self._parts:
                if kind == "content" or self._has_reasoning:
                    self._parts[kind].append(piece)
                    deltas.append({kind: piece})
            else:
                deltas.append({"tool_calls": [self._call(kind, piece)]})
        return _joined(deltas)

    def whole(self) -> dict[str, Any]:
        """Return the message so far."""
        message: dict[str, Any] = {"role": "assistant"}
        content = "".join(self._parts["content"])
        message["content"] = None if self._calls and not content else content
        if reasoning := "".join(self._parts["reasoning"]):
            message["reasoning"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _call(self, kind: str, piece: str) -> dict[str, Any]:
        if kind == "name":
            function = {"name": piece, "arguments": ""}
            call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
            self._calls.append(call)
            return {**call, "index": len(self._calls) - 1, "function": {**function}}
        self._calls[-1]["function"]["arguments"] += piece
        return {"index": len(self._calls) - 1, "function": {"arguments": piece}}


def _joined(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    for delta in deltas:
        [kind] = delta
        if joined and kind in joined[-1]:
            last = joined[-1]
            if kind != "tool_calls":
                last[kind] += delta[kind]
                continue
            [call], [more] = last[kind][-1:], delta[kind]
            if call["index"] == more["index"] and "id" not in more:
                call["function"]["arguments"] += more["function"]["arguments"]
                continue
            last[kind].append(more)
            continue
        joined.append(delta)
    return joined
