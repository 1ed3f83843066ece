"""Reasoning and tool calls: the same whatever the text is cut into."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.serve.parser import OutputParser

settings.register_profile("parser", derandomize=True, deadline=None, max_examples=300)
PROFILE = settings.get_profile("parser")
TOOLS: dict[str, Any] = {
    "look": {"properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {},
}
XML = (
    '<tool_call>\n<function=look>\n<parameter=place>\nRio "a"\nb\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
JSON = (
    '<tool_call>\n{"name": "look", "arguments": {"place": "}\\"", "days": [1, {"a": 2}]}}\n'
    "</tool_call>"
)


def parse(text: str, sizes: list[int], **options: Any) -> list[tuple[str, str]]:
    """Feed pieces of these sizes and join events of one kind that follow each other."""
    parser = OutputParser(**options)
    events, start = [], 0
    for size in [*sizes, len(text)]:
        events += parser.push(text[start : start + size])
        start += size
    events += parser.finish()
    joined: list[tuple[str, str]] = []
    for event in events:
        if joined and joined[-1][0] == event.kind != "name":
            joined[-1] = (event.kind, joined[-1][1] + event.text)
        else:
            joined.append((event.kind, event.text))
    return joined


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("plain <text>", {}, [("content", "plain <text>")]),
        ("a</think>b", {}, [("content", "a</think>b")]),
        ("a\n</think>\n\nb\n", {"is_reasoning": True}, [("reasoning", "a"), ("content", "b\n")]),
        ("\n</think>\n\nb", {"is_reasoning": True}, [("content", "b")]),
        ("a", {"is_reasoning": True}, [("reasoning", "a")]),
        ("a\n</thin", {"is_reasoning": True}, [("reasoning", "a\n</thin")]),
        (" <think>\na</think>b", {"has_reasoning": True}, [("reasoning", "a"), ("content", "b")]),
        ("b <think>a</think>", {"has_reasoning": True}, [("content", "b <think>a</think>")]),
        ("<thin", {"has_reasoning": True}, [("content", "<thin")]),
        (XML, {}, [("content", XML)]),
        ("a\n<tool", {"tools": TOOLS}, [("content", "a\n<tool")]),
        ("<tool_call>\nno call</tool_call> b", {"tools": TOOLS},
         [("content", "<tool_call>\nno call</tool_call> b")]),
        ("<tool_call>\n<function=lo", {"tools": TOOLS},
         [("content", "<tool_call>\n<function=lo")]),
        ("<tool_call>{}</tool_call>", {"tools": TOOLS}, [("content", "<tool_call>{}</tool_call>")]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', {"tools": TOOLS},
         [("name", "f"), ("arguments", '{"a": 1}')]),
        ('<tool_call>{"name": "now"}</tool_call>', {"tools": TOOLS},
         [("name", "now"), ("arguments", "{}")]),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>\n", {"tools": TOOLS},
         [("name", "now"), ("arguments", "{}")]),
        ("<tool_call>\n<function=now>\n</tool_call>", {"tools": TOOLS},
         [("name", "now"), ("arguments", "{}")]),
        ("<tool_call><function=look><parameter=days>yes</parameter></function>", {"tools": TOOLS},
         [("name", "look"), ("arguments", '{"days": "yes"}')]),
        ("<tool_call><function=look><parameter=days>-1e999</parameter></function>",
         {"tools": TOOLS}, [("name", "look"), ("arguments", '{"days": "-1e999"}')]),
        ('<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>', {"tools": TOOLS},
         [("content", '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>')]),
        ('<tool_call>{"name": "f\\x", "arguments": {}}</tool_call>b', {"tools": TOOLS},
         [("content", '<tool_call>{"name": "f\\x", "arguments": {}}</tool_call>b')]),
        ('<tool_call>{"name": "f\n", "arguments": {}}</tool_call>', {"tools": TOOLS},
         [("content", '<tool_call>{"name": "f\n", "arguments": {}}</tool_call>')]),
        ('<tool_call>{"name": "\\u0066\\"", "arguments": {}}</tool_call>', {"tools": TOOLS},
         [("name", 'f"'), ("arguments", "{}")]),
        ("<tool_call><function=look><parameter=place>R\n", {"tools": TOOLS},
         [("name", "look"), ("arguments", '{"place": "R\\n')]),
        ('<tool_call>{"name": "f", "arguments": {"a', {"tools": TOOLS},
         [("name", "f"), ("arguments", '{"a')]),
    ],
)  # fmt: skip
def test_what_texts_mean(
    text: str, options: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    options = {"has_reasoning": options.get("is_reasoning", False), **options}
    assert parse(text, [], **options) == expected
    assert parse(text, [1] * len(text), **options) == expected


@pytest.mark.parametrize("call", [XML, JSON])
def test_calls_between_words(call: str) -> None:
    text = f"so\n</think>\n\nFirst\n\n{call}\n{call}\n"
    events = parse(text, [], is_reasoning=True, has_reasoning=True, tools=TOOLS)
    kinds = [kind for kind, _ in events]
    assert kinds == ["reasoning", "content", "name", "arguments", "name", "arguments"]
    assert [events[1][1], events[2][1]] == ["First", "look"]
    arguments = json.loads(events[3][1])
    wanted = {"place": 'Rio "a"\nb', "days": 3} if call == XML else None
    assert arguments == (wanted or {"place": '}"', "days": [1, {"a": 2}]})


def test_arguments_come_in_pieces() -> None:
    parser = OutputParser(tools=TOOLS)
    pieces = [event.text for char in XML for event in parser.push(char)]
    assert len(pieces) > 12 and pieces[0] == "look"
    assert "".join(pieces[1:]) == '{"place": "Rio \\"a\\"\\nb", "days": 3}'


PARTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=look>", "</function>",
     "<parameter=place>", "<parameter=days>", "</parameter>", "\n", " ", "é", '"', "\\", "{", "}",
     '{"name": "now", "arguments": {', "<", "3", "a", XML, JSON]
)  # fmt: skip


@PROFILE
@given(
    parts=st.lists(PARTS, max_size=14),
    sizes=st.lists(st.integers(1, 9), max_size=80),
    has_reasoning=st.booleans(),
    is_reasoning=st.booleans(),
    has_tools=st.booleans(),
)
def test_cuts_change_nothing(
    parts: list[str], sizes: list[int], has_reasoning: bool, is_reasoning: bool, has_tools: bool
) -> None:
    text = "".join(parts)
    options: dict[str, Any] = {
        "has_reasoning": has_reasoning,
        "is_reasoning": is_reasoning,
        "tools": TOOLS if has_tools else None,
    }
    single = parse(text, [1] * len(text), **options)
    assert parse(text, sizes, **options) == single
    assert parse(text, [], **options) == single
    if not has_tools and not is_reasoning and not has_reasoning:
        assert "".join(piece for _, piece in single) == text


def test_a_name_that_never_comes_is_no_call() -> None:
    text = "<tool_call>" + " " * 5000 + "<function=look></function></tool_call>"
    expected = [("content", text)]
    assert parse(text, [], tools=TOOLS) == expected
    assert parse(text, [7] * 1000, tools=TOOLS) == expected
