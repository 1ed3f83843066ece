"""Tells reasoning and tool calls from content, as Qwen models write them.

The parser takes text cut anywhere: its events, joined, depend on the whole text only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

__all__ = ["OutputParser", "ParsedEvent"]

_THINK, _THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION_END = "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MAX_HEAD = 4096  # characters of a call in which its function's name has to come
_XML_HEAD = re.compile(r"\s*<function=([^<>\n]{1,256})>")
# A text that is none in JSON, with a control character or another escape, begins no call.
_NAME = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
_JSON_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_NAME})\s*,\s*"arguments"\s*:\s*(?=\{{)')

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
Form = Callable[[str], str]


class ParsedEvent(NamedTuple):
    """A piece of the answer.

    Attributes:
        kind: "reasoning", "content", "name" (of a function: a call begins) or "arguments" (of the
            newest call: a piece of JSON).
        text: the piece.
    """

    kind: str
    text: str


class OutputParser:
    """Parses one continuation.

    Args:
        has_reasoning: whether to look for reasoning.
        is_reasoning: whether the prompt ends inside reasoning.
        tools: parameters' JSON schemas by name of the function; None looks for no calls.
    """

    def __init__(
        self,
        *,
        has_reasoning: bool = False,
        is_reasoning: bool = False,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.num_calls = 0
        self._tools = tools
        self._buffer = ""
        self._has_ended = False
        self._events: list[ParsedEvent] = []
        self._run = self._parse(has_reasoning, is_reasoning)
        next(self._run)

    def push(self, text: str) -> list[ParsedEvent]:
        """Add text and return what became certain."""
        self._buffer += text
        next(self._run, None)
        return self._taken()

    def finish(self) -> list[ParsedEvent]:
        """End the text and return the rest; what ends inside a marker is text."""
        self._has_ended = True
        next(self._run, None)
        return self._taken()

    def _taken(self) -> list[ParsedEvent]:
        events, self._events = self._events, []
        return events

    def _emit(self, kind: str | None, text: str) -> None:
        if text and kind is not None:
            self._events.append(ParsedEvent(kind, text))

    # What follows runs as one program over the text; it yields where it needs more of it.

    def _parse(self, has_reasoning: bool, is_reasoning: bool) -> Steps[None]:
        if has_reasoning and not is_reasoning:
            is_reasoning = yield from self._opens_with(_THINK)
        if is_reasoning:
            yield from self._strip("\n")
            if (yield from self._until((_THINK_END,), "reasoning")) is None:
                return
            yield from self._strip("\n")
        markers = (_CALL,) if self._tools is not None else ()
        while (yield from self._until(markers, "content")) is not None:
            if (yield from self._call()):
                yield from self._strip(None)

    def _opens_with(self, marker: str) -> Steps[bool]:
        """Consume white space and a marker if the text begins with them."""
        while True:
            rest = self._buffer.lstrip()
            if rest.startswith(marker):
                self._buffer = rest[len(marker) :]
                return True
            if self._has_ended or not marker.startswith(rest):
                return False
            yield

    def _strip(self, characters: str | None) -> Steps[None]:
        """Drop such characters, None for all white space, from where the text goes on."""
        while True:
            self._buffer = self._buffer.lstrip(characters)
            if self._buffer or self._has_ended:
                return
            yield

    def _until(
        self, markers: Sequence[str], kind: str | None, *, form: Form = str
    ) -> Steps[str | None]:
        """Emit text up to one of the markers, and consume that; line ends before it are dropped.

        Args:
            markers: what ends the text.
            kind: of the events; None drops the text.
            form: how a piece is written.

        Returns:
            The marker, or None at the end of all text, which is emitted as it is.
        """
        while True:
            places = [(at, m) for m in markers if (at := self._buffer.find(m)) >= 0]
            at, marker = min(places, default=(len(self._buffer), None))
            text = self._buffer[:at]
            if marker is not None:
                self._buffer = self._buffer[at + len(marker) :]
                self._emit(kind, form(text.rstrip("\n")))
                return marker
            if self._has_ended:
                self._buffer = ""
                self._emit(kind, form(text))
                return None
            kept = _num_held(text, markers)
            self._buffer = text[len(text) - kept :]
            self._emit(kind, form(text[: len(text) - kept]))
            yield

    def _up_to(self, marker: str) -> Steps[str | None]:
        """Consume and return text up to a marker; None, and nothing left, where there is none."""
        while marker not in self._buffer:
            if self._has_ended:
                self._buffer = ""
                return None
            yield
        text, _, self._buffer = self._buffer.partition(marker)
        return text

    def _call(self) -> Steps[bool]:
        """Parse what follows the marker; returns whether it is a call."""
        while True:
            head = self._buffer[:_MAX_HEAD]
            if found := _XML_HEAD.match(head):
                self._buffer = self._buffer[found.end() :]
                self._begin(found[1].strip())
                yield from self._xml_arguments(found[1].strip())
                return True
            if found := _JSON_HEAD.match(head):
                self._buffer = self._buffer[found.end() :]
                self._begin(json.loads(found[1]))
                yield from self._json_arguments()
                return True
            has_ended = self._has_ended or len(self._buffer) >= _MAX_HEAD
            if _CALL_END in head or has_ended:
                text, marker, rest = self._buffer.partition(_CALL_END)
                if _CALL_END not in head:
                    text, marker, rest = "", "", self._buffer
                self._buffer = rest
                return self._whole_call(text, marker)
            yield

    def _whole_call(self, text: str, marker: str) -> bool:
        """Take a call as one piece of JSON; what is none is content as it stands."""
        try:
            call = _loads(text)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, RecursionError):
            name, arguments = None, None
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            self._emit("content", _CALL + text + marker)
            return False
        self._begin(name)
        written = arguments if isinstance(arguments, str) else _json(arguments)
        self._emit("arguments", written)
        return True

    def _begin(self, name: str) -> None:
        self.num_calls += 1
        self._emit("name", name)

    def _xml_arguments(self, function: str) -> Steps[None]:
        schema = (self._tools or {}).get(function, {}).get("properties")
        opening = "{"
        while True:
            marker = yield from self._until((_PARAMETER, _FUNCTION_END, _CALL_END), None)
            if marker is None:
                return
            if marker != _PARAMETER:
                self._emit("arguments", "{}" if opening == "{" else "}")
                if marker == _FUNCTION_END:
                    yield from self._until((_CALL_END,), None)
                return
            name = yield from self._up_to(">")
            if name is None:
                return
            yield from self._one_line_end()
            self._emit("arguments", f"{opening}{_json(name.strip())}: ")
            opening = ", "
            if _is_text(schema, name.strip()):
                self._emit("arguments", '"')
                if (yield from self._until((_PARAMETER_END,), "arguments", form=_inside)) is None:
                    return
                self._emit("arguments", '"')
            else:
                value = yield from self._up_to(_PARAMETER_END)
                if value is None:
                    return
                self._emit("arguments", _as_json(value.strip()))

    def _one_line_end(self) -> Steps[None]:
        while not self._buffer and not self._has_ended:
            yield
        self._buffer = self._buffer.removeprefix("\n")

    def _json_arguments(self) -> Steps[None]:
        """Pass an object on as it is written, up to the brace that closes it."""
        depth, in_text, is_escaped = 0, False, False
        while True:
            for i, char in enumerate(self._buffer):
                if in_text:
                    in_text = is_escaped or char != '"'
                    is_escaped = not is_escaped and char == "\\"
                elif char == '"':
                    in_text = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                    if depth == 0:
                        self._emit("arguments", self._buffer[: i + 1])
                        self._buffer = self._buffer[i + 1 :]
                        yield from self._until((_CALL_END,), None)
                        return
            self._emit("arguments", self._buffer)
            self._buffer = ""
            if self._has_ended:
                return
            yield


def _num_held(text: str, markers: Sequence[str]) -> int:
    """Characters at the end that may begin a marker, line ends before them included."""
    if not markers:
        return 0
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    before = text[: len(text) - longest]
    return longest + len(before) - len(before.rstrip("\n"))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _inside(text: str) -> str:
    """Write a piece of a text as it stands between the quotes of JSON."""
    return _json(text)[1:-1]


def _is_text(schema: Any, name: str) -> bool:
    """Whether a parameter is a text; one that the schema does not know is."""
    entry = schema.get(name) if isinstance(schema, dict) else None
    kind = entry.get("type", "string") if isinstance(entry, dict) else "string"
    return bool(kind == "string")


def _loads(text: str) -> Any:
    """Read JSON; numbers that JSON cannot write again are none."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _as_json(value: str) -> str:
    """Write a value that is no text; what is not JSON becomes one."""
    try:
        return _json(_loads(value))
    except (ValueError, RecursionError):
        lowered = value.lower()
        return lowered if lowered in ("true", "false") else _json(value)
