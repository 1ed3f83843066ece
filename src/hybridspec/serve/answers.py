"""Completions and chats: from checked fields to an answer, whole or in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridspec.config import SamplingParams
from hybridspec.engine import StepOutput
from hybridspec.engine.request import Request
from hybridspec.models import Tokenizer
from hybridspec.serve.errors import ApiError, error_body
from hybridspec.serve.fields import ChatBody, CompletionBody
from hybridspec.serve.parser import OutputParser
from hybridspec.serve.replies import (
    ChatMessage,
    Head,
    Marks,
    chat_logprobs,
    check_error,
    completion_logprobs,
    usage_of,
)
from hybridspec.serve.stepper import Stream
from hybridspec.serve.wire import DONE, event

__all__ = [
    "ChatPlan",
    "answer_chat",
    "answer_completion",
    "stream_chat",
    "stream_completion",
]


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """How a chat's output is read.

    Attributes:
        prompt: what the template made, with what a forced call begins with.
        forced: that beginning; the model goes on behind it.
        has_reasoning, is_reasoning, tools: as in OutputParser.
    """

    prompt: str
    forced: str = ""
    has_reasoning: bool = False
    is_reasoning: bool = False
    tools: Mapping[str, Mapping[str, Any]] | None = None

    def message(self, *, has_reasoning: bool) -> ChatMessage:
        parser = OutputParser(
            has_reasoning=self.has_reasoning, is_reasoning=self.is_reasoning, tools=self.tools
        )
        return ChatMessage(parser, has_reasoning=has_reasoning)


class _Guard:
    """Writes the end of a stream, and what goes wrong in it as an event."""

    def __init__(self, body: CompletionBody | ChatBody, stream: Stream, head: Head) -> None:
        options = body.stream_options
        self.stream, self.head = stream, head
        self.has_usage = options is not None and options.include_usage
        self.is_continuous = options is not None and options.continuous_usage_stats
        self.body = body

    def usage(self) -> dict[str, Any]:
        return usage_of(self.stream.requests, self.body)

    def chunk(self, choice: dict[str, Any]) -> bytes:
        more = {"usage": self.usage()} if self.is_continuous else {}
        return event(self.head.body([choice], **more))

    async def run(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield chunk
            if self.has_usage:
                yield event(self.head.body([], usage=self.usage()))
        except ApiError as error:
            yield event(error_body(error))
        yield DONE


def _checked(stream: Stream, place: int, step: StepOutput) -> Request:
    request = stream.requests[place].continuations[step.index]
    if step.finish_reason == "error":
        check_error(request.output().outputs[step.index])
    return request


def _end(step: StepOutput) -> dict[str, Any]:
    return {"finish_reason": step.finish_reason, "stop_reason": step.stop_reason}


def _prompt_text(request: Request, tokenizer: Tokenizer) -> str:
    """Return the text that the model was given: of a truncated prompt the end."""
    text = request.group.prompt
    if text is None or request.params.truncate_prompt_tokens is not None:
        return tokenizer.decode(request.prompt_token_ids)
    return text


async def answer_completion(
    body: CompletionBody, stream: Stream, head: Head, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Wait for all continuations and return the answer."""
    async for _ in stream.steps():
        pass
    choices: list[dict[str, Any]] = []
    for request in stream.requests:
        result = request.output()
        for output in result.outputs:
            check_error(output)
            token_ids, reports, text = output.token_ids, output.logprobs, output.text
            if body.max_tokens == 0:
                token_ids, reports, text = [], None if reports is None else [], ""
            if body.echo:
                text = _prompt_text(request, tokenizer) + text
                if reports is not None and result.prompt_logprobs is not None:
                    token_ids = result.prompt_token_ids + token_ids
                    reports = [*result.prompt_logprobs, *reports]  # type: ignore[list-item]
            choice: dict[str, Any] = {
                "index": len(choices),
                "text": text,
                "logprobs": completion_logprobs(token_ids, reports, tokenizer),
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
            }
            if body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = _prompt_reports(result.prompt_logprobs)
            if body.return_token_ids:
                choice |= {"token_ids": token_ids, "prompt_token_ids": result.prompt_token_ids}
            choices.append(choice)
    usage = usage_of(stream.requests, body)
    return head.body(choices, usage=usage)


def _prompt_reports(reports: Any) -> list[Any] | None:
    if reports is None:
        return None
    return [
        None
        if report is None
        else {
            str(token): {
                "logprob": one.logprob,
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token, one in report.items()
        }
        for report in reports
    ]


def stream_completion(
    body: CompletionBody, stream: Stream, head: Head, tokenizer: Tokenizer, params: SamplingParams
) -> AsyncIterator[bytes]:
    """Return the events of a completion."""
    guard = _Guard(body, stream, head)

    async def chunks() -> AsyncIterator[bytes]:
        offsets: dict[int, int] = {}
        marks: dict[int, Marks] = {}
        async for arrived in stream.steps():
            for place, step in arrived:
                request = _checked(stream, place, step)
                index = place * params.n + step.index
                token_ids, text, reports = step.token_ids, step.text, step.logprobs
                if body.max_tokens == 0:
                    token_ids, text, reports = [], "", None if reports is None else []
                if body.echo and step.step == 0:
                    text = _prompt_text(request, tokenizer) + text
                    found = request.group.prompt_logprobs
                    if reports is not None and found is not None:
                        token_ids = request.prompt_token_ids + token_ids
                        reports = [*found, *reports]  # type: ignore[list-item]
                logprobs = completion_logprobs(token_ids, reports, tokenizer, offsets.get(index, 0))
                if logprobs is not None and token_ids:
                    # Of the tokens, not of the text handed out: some of it may be held back.
                    offsets[index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
                choice: dict[str, Any] = {
                    "index": index,
                    "text": text,
                    "logprobs": logprobs,
                    **_end(step),
                }
                if body.return_token_ids:
                    choice["token_ids"] = token_ids
                if body.return_speculation:
                    choice["speculation"] = marks.setdefault(index, Marks(tokenizer)).of(step)
                yield guard.chunk(choice)

    return guard.run(chunks())


def _chat_end(step_reason: str | None, message: ChatMessage) -> str | None:
    return "tool_calls" if step_reason == "stop" and message.has_calls else step_reason


async def answer_chat(
    body: ChatBody, plan: ChatPlan, stream: Stream, head: Head, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Wait for all continuations and return the answer."""
    async for _ in stream.steps():
        pass
    [request] = stream.requests
    result = request.output()
    choices = []
    for output in result.outputs:
        check_error(output)
        message = plan.message(has_reasoning=body.include_reasoning)
        message.deltas(plan.forced + output.text, is_last=True)
        choice: dict[str, Any] = {
            "index": output.index,
            "message": message.whole(),
            "logprobs": chat_logprobs(
                output.token_ids, output.logprobs, body.top_logprobs or 0, tokenizer
            ),
            "finish_reason": _chat_end(output.finish_reason, message),
            "stop_reason": output.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = output.token_ids
        choices.append(choice)
    usage = usage_of(stream.requests, body)
    more: dict[str, Any] = {"usage": usage}
    if body.prompt_logprobs is not None:
        more["prompt_logprobs"] = _prompt_reports(result.prompt_logprobs)
    if body.return_token_ids:
        more["prompt_token_ids"] = result.prompt_token_ids
    return head.body(choices, **more)


def stream_chat(
    body: ChatBody, plan: ChatPlan, stream: Stream, head: Head, tokenizer: Tokenizer
) -> AsyncIterator[bytes]:
    """Return the events of a chat."""
    guard = _Guard(body, stream, head)

    async def chunks() -> AsyncIterator[bytes]:
        messages: dict[int, ChatMessage] = {}
        marks: dict[int, Marks] = {}
        async for arrived in stream.steps():
            for place, step in arrived:
                _checked(stream, place, step)
                text, index = step.text, step.index
                if index not in messages:
                    messages[index] = plan.message(has_reasoning=body.include_reasoning)
                    text = plan.forced + text
                    opening = {"role": "assistant", "content": ""}
                    yield guard.chunk({"index": index, "delta": opening, "finish_reason": None})
                message = messages[index]
                deltas = message.deltas(text, is_last=step.finished)
                extra: dict[str, Any] = {}
                if step.logprobs is not None:
                    count = body.top_logprobs or 0
                    extra["logprobs"] = chat_logprobs(
                        step.token_ids, step.logprobs, count, tokenizer
                    )
                if body.return_token_ids:
                    extra["token_ids"] = step.token_ids
                if body.return_speculation:
                    extra["speculation"] = marks.setdefault(index, Marks(tokenizer)).of(step)
                if not deltas and (extra or step.finished):
                    deltas = [{}]
                for i, delta in enumerate(deltas):
                    choice = {"index": index, "delta": delta, "finish_reason": None}
                    if i == 0:
                        choice |= extra
                    if step.finished and i == len(deltas) - 1:
                        choice |= _end(step)
                        choice["finish_reason"] = _chat_end(step.finish_reason, message)
                    yield guard.chunk(choice)

    return guard.run(chunks())
