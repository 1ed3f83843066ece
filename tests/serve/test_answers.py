"""Answers made of scripted steps: in pieces as in one, whatever the steps were."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec import SamplingParams, StepOutput
from hybridspec.bundled import bundled_model_path
from hybridspec.engine.request import Request, RequestGroup
from hybridspec.engine.text import Text
from hybridspec.models import load_tokenizer
from hybridspec.ops.sampling import NO_TOKEN
from hybridspec.runtime import SlotOptions
from hybridspec.serve.answers import (
    ChatPlan,
    answer_chat,
    answer_completion,
    stream_chat,
    stream_completion,
)
from hybridspec.serve.errors import ApiError
from hybridspec.serve.fields import ChatBody, CompletionBody
from hybridspec.serve.replies import Head
from hybridspec.serve.tools import forced_call
from hybridspec.speculate import Logprob

TOKENIZER = load_tokenizer(bundled_model_path())  # a token is a byte
END = 256
HEAD = Head("id", "kind", 0, "small")
TOOLS: dict[str, Any] = {"look": {"properties": {"days": {"type": "integer"}}}, "now": {}}
CALL = (
    "<tool_call>\n<function=look>\n<parameter=place>\nRio é\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
PROFILE = settings(derandomize=True, deadline=None, max_examples=60)


class ScriptedStream:
    """Stands for a Stream whose steps are known."""

    def __init__(self, tokens: list[int], sizes: list[int], params: SamplingParams) -> None:
        group = RequestGroup(
            request_id=0,
            prompt="pq",
            prompt_token_ids=[*b"pq"],
            params=params,
            stop_ids=frozenset({END}),
            limit=10_000,
            tokenizer=TOKENIZER,
            prompt_logprobs=[None],
        )
        group.add_prompt_reports([{ord("q"): Logprob(-2.0, 1)}])
        text = Text(TOKENIZER.detokenizer(), tuple(params.stop))
        request = Request(group=group, options=SlotOptions(), text=text)
        start = 0
        for size in [*sizes, len(tokens)]:
            step = tokens[start : start + size]
            start += size
            taken = request.take(step, [{max(token, 0): Logprob(-1.0, 1)} for token in step])
            drafts = step[: max(taken - 1, 0)]
            stats = request.stats  # a verify step's, no prefill's
            stats.committed_per_step.append(taken)
            stats.drafted_per_step.append(len(drafts))
            stats.accepted_per_step.append(len(drafts))
            request.post(taken, len(drafts), drafts, 0, False)
            if request.finish_reason is not None:
                break
        self.requests = [request]
        self._steps: list[StepOutput] = list(request.outbox)

    async def steps(self) -> AsyncIterator[list[tuple[int, StepOutput]]]:
        for step in self._steps:
            yield [(0, step)]


def chat_body(**fields: Any) -> ChatBody:
    return ChatBody(messages=[{"role": "user", "content": "x"}], **fields)


def whole(stream: Any, plan: ChatPlan, body: ChatBody) -> dict[str, Any]:
    answer = asyncio.run(answer_chat(body, plan, stream, HEAD, TOKENIZER))
    [choice] = answer["choices"]
    return choice


def streamed(stream: Any, plan: ChatPlan, body: ChatBody) -> list[dict[str, Any]]:
    async def collect() -> list[bytes]:
        return [event async for event in stream_chat(body, plan, stream, HEAD, TOKENIZER)]

    events = asyncio.run(collect())
    assert events[-1] == b"data: [DONE]\n\n"
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put deltas together as clients do."""
    message: dict[str, Any] = {"role": None, "content": ""}
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        message["role"] = delta.get("role", message["role"])
        for name in ("content", "reasoning"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"type": call["type"], "name": call["function"]["name"], "text": ""})
            calls[call["index"]]["text"] += call["function"]["arguments"]
    if calls:
        message["calls"] = [(call["name"], call["text"]) for call in calls]
    return {**message, "end": chunks[-1]["choices"][0]["finish_reason"]}


def same_form(choice: dict[str, Any]) -> dict[str, Any]:
    message = dict(choice["message"])
    message["content"] = message["content"] or ""
    if calls := message.pop("tool_calls", None):
        message["calls"] = [
            (call["function"]["name"], call["function"]["arguments"]) for call in calls
        ]
    return {**message, "end": choice["finish_reason"]}


PARTS = st.sampled_from(["so é", "\n", "</think>", "<tool_call>", CALL, "x", "END", "<think>"])


@PROFILE
@given(
    parts=st.lists(PARTS, max_size=6),
    sizes=st.lists(st.integers(1, 8), max_size=60),
    is_reasoning=st.booleans(),
    has_tools=st.booleans(),
)
def test_pieces_make_the_whole(
    parts: list[str], sizes: list[int], is_reasoning: bool, has_tools: bool
) -> None:
    tokens = [*"".join(parts).encode(), END]
    params = SamplingParams(stop="END", logprobs=0)
    plan = ChatPlan(
        "p", has_reasoning=True, is_reasoning=is_reasoning, tools=TOOLS if has_tools else None
    )
    body = chat_body(logprobs=True)
    chunks = streamed(ScriptedStream(tokens, sizes, params), plan, body)
    single = whole(ScriptedStream(tokens, [1] * len(tokens), params), plan, body)
    assert joined(chunks) == same_form(single)
    reports = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert reports == single["logprobs"]["content"]


@PROFILE
@given(text=st.text("aEN", max_size=12), sizes=st.lists(st.integers(1, 4), max_size=12))
def test_offsets_say_where_tokens_are(text: str, sizes: list[int]) -> None:
    """Also where a step's text is held back, since it may begin a stop string."""
    params = SamplingParams(stop="END", logprobs=0)
    stream: Any = ScriptedStream([*text.encode(), END], sizes, params)
    body = CompletionBody(prompt="pq", logprobs=0)

    async def collect() -> list[bytes]:
        chunks = stream_completion(body, stream, HEAD, TOKENIZER, params)
        return [event async for event in chunks]

    events = [event.removeprefix(b"data: ") for event in asyncio.run(collect())[:-1]]
    reports = [json.loads(event)["choices"][0]["logprobs"] for event in events]
    joined = {name: [one for report in reports for one in report[name]] for name in reports[0]}
    [choice] = asyncio.run(answer_completion(body, stream, HEAD, TOKENIZER))["choices"]
    assert joined == choice["logprobs"]
    assert joined["tokens"][:-1] == list(text)
    assert joined["text_offset"] == list(range(len(text) + 1))


def test_offsets_begin_with_an_echoed_prompt() -> None:
    stream: Any = ScriptedStream([*b"ab", END], [], SamplingParams(logprobs=0))
    body = CompletionBody(prompt="pq", echo=True, logprobs=0)
    [choice] = asyncio.run(answer_completion(body, stream, HEAD, TOKENIZER))["choices"]
    assert choice["text"] == "pqab"
    assert choice["logprobs"]["tokens"][:-1] == ["p", "q", "a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -1.0, -1.0, -1.0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


def test_an_echoed_prompt_is_what_was_kept_of_it() -> None:
    params = SamplingParams(truncate_prompt_tokens=2)
    stream: Any = ScriptedStream([*b"ab", END], [], params)
    stream.requests[0].group.prompt = "nopq"
    body = CompletionBody(prompt="nopq", echo=True, truncate_prompt_tokens=2)
    [choice] = asyncio.run(answer_completion(body, stream, HEAD, TOKENIZER))["choices"]
    assert choice["text"] == "pqab"


def test_a_call_after_reasoning() -> None:
    tokens = [*f"let me see\n</think>\n\nI look.\n\n{CALL}".encode(), END]
    plan = ChatPlan("p", has_reasoning=True, is_reasoning=True, tools=TOOLS)
    choice = whole(ScriptedStream(tokens, [], SamplingParams()), plan, chat_body())
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("let me see", "I look.")
    [call] = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"place": "Rio é", "days": 3}
    assert choice["finish_reason"] == "tool_calls"
    hidden = whole(
        ScriptedStream(tokens, [], SamplingParams()), plan, chat_body(include_reasoning=False)
    )
    assert "reasoning" not in hidden["message"]


@pytest.mark.parametrize("has_xml", [False, True])
@pytest.mark.parametrize("choice", [None, "now"])
def test_a_forced_beginning_is_part_of_the_call(has_xml: bool, choice: str | None) -> None:
    opening = forced_call(choice, has_xml=has_xml)
    if has_xml:
        rest = ("now>\n" if choice is None else "") + "</function>\n</tool_call>"
    else:
        rest = ('now", "arguments": ' if choice is None else "") + "{}}\n</tool_call>"
    plan = ChatPlan("p", forced=opening, tools=TOOLS)
    tokens = [*rest.encode(), END]
    result = same_form(whole(ScriptedStream(tokens, [], SamplingParams()), plan, chat_body()))
    assert result["calls"] == [("now", "{}")] and result["content"] == ""
    chunks = streamed(ScriptedStream(tokens, [2] * 40, SamplingParams()), plan, chat_body())
    assert joined(chunks) == result


def test_a_model_of_nan() -> None:
    plan = ChatPlan("p")
    with pytest.raises(ApiError, match="hold NaN"):
        whole(ScriptedStream([97, NO_TOKEN], [], SamplingParams()), plan, chat_body())
    stream = ScriptedStream([97, NO_TOKEN], [1], SamplingParams())
    *_, last = streamed(stream, plan, chat_body())
    assert last["error"]["code"] == "model_error" and "hold NaN" in last["error"]["message"]


def test_usage_along_the_way() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = ScriptedStream([*b"abc", END], [1, 1], SamplingParams())
    body = chat_body(stream_options=options, return_speculation=True)
    chunks = streamed(stream, ChatPlan("p"), body)
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)
    assert chunks[-1]["choices"] == []
    pieces = [
        piece
        for chunk in chunks[:-1]
        for piece in chunk["choices"][0].get("speculation", {"pieces": []})["pieces"]
    ]
    assert pieces == [["a", "bonus"], ["b", "bonus"], ["c", "accepted"], ["", "bonus"]]


def test_answers_from_drafts_accepted_by_force_say_so() -> None:
    forced = Head("id", "kind", 0, "small", is_synthetic=True)
    assert forced.body([])["system_fingerprint"] == "synthetic-acceptance"
    assert "system_fingerprint" not in HEAD.body([])
