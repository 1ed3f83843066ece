"""From messages to a prompt, with a checkpoint's own chat template.

Templates are programs written in Jinja that come with a checkpoint. They run in a process of their
own, in Jinja's sandbox, see plain data only, and render as `apply_chat_template` of transformers
renders them, given the same texts: content in parts is joined, and the arguments of tool calls are
parsed where they are JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridspec.errors import CheckpointError, UnsupportedError, visible
from hybridspec.models.fields import is_there, read_json, read_text
from hybridspec.models.templates import TemplateError, TemplateFailure, run_template
from hybridspec.values import flag, shown

__all__ = ["ChatTemplates", "is_conversation"]

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_OWN_NAMES = (
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
)
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_MAX_DEPTH = 100
# Marks where the last message ends; the space behind it tells whether the template trims.
_MARK = "\ue000end of the message\ue000"


def is_conversation(messages: Any) -> bool:
    """Return whether `messages` is one conversation and not a list of them."""
    return not (
        isinstance(messages, Sequence) and messages and isinstance(messages[0], list | tuple)
    )


class ChatTemplates:
    """The chat templates of one checkpoint.

    Args:
        templates: text of each template by name; "default" is the usual one.
        variables: what every template sees: the special tokens.
        source: where they come from, for messages.
    """

    def __init__(
        self, templates: Mapping[str, str], variables: Mapping[str, str], source: str
    ) -> None:
        self.templates = dict(templates)
        self.variables = dict(variables)
        self.source = source

    @classmethod
    def from_folder(cls, path: str | Path) -> ChatTemplates:
        """Read the templates of a model folder.

        `chat_template.jinja` and `additional_chat_templates/*.jinja` come before the field
        `chat_template` of `tokenizer_config.json`, which is a text or a list of named ones.

        Returns:
            The templates, none at all where the folder has none.

        Raises:
            CheckpointError: if a file is broken.
        """
        folder = Path(path)
        config_file = folder / "tokenizer_config.json"
        sources = (folder / "special_tokens_map.json", config_file)
        config = {
            name: value
            for file in sources
            if is_there(file)
            for name, value in read_json(file).items()
        }
        variables = {}
        for name in _SPECIAL_TOKENS:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                variables[name] = token
        templates = _named_templates(config.get("chat_template"), config_file)
        files = {"default": folder / "chat_template.jinja"}
        extra = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        files |= {file.stem: file for file in extra}
        found = {name: _text(file) for name, file in files.items() if is_there(file)}
        return cls(found or templates, variables, str(folder))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Render one conversation.

        Args:
            messages: with "role" and "content" each, oldest first; content is a text, or a list of
                {"type": "text", "text": ...}, which are joined.
            tools: JSON schemas of functions that the model may call.
            chat_template: a template, or the name of one of the checkpoint's; None takes the
                checkpoint's: "tool_use" with tools if there is one, else "default".
            add_generation_prompt: whether to open the assistant's answer at the end.
            continue_final_message: end inside the last message, for the model to go on with it.
            chat_template_kwargs: what else the template looks at, such as `enable_thinking`.
            template_kwargs: the same, one by one.

        Raises:
            ValueError: if there is no template, or the template refuses the messages or takes too
                much time or memory.
            TypeError: if messages or tools are not plain data.
            UnsupportedError: if a message holds something other than text.
            CheckpointError: if the checkpoint's template is not valid Jinja.
        """
        flag("add_generation_prompt", add_generation_prompt)
        flag("continue_final_message", continue_final_message)
        text = self._template(chat_template, has_tools=bool(tools))
        plain = _plain_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError(
                    "continue_final_message: expected False with add_generation_prompt, got True"
                )
            plain = _marked(plain)
        variables = {
            **self.variables,
            **_joined(chat_template_kwargs, template_kwargs),
            "messages": plain,
            "tools": None if tools is None else _plain_list("tools", tools),
            "add_generation_prompt": add_generation_prompt,
        }
        variables.setdefault("documents", None)
        rendered = self._rendered(text, variables, is_own=text != chat_template)
        return _cut(rendered) if continue_final_message else rendered

    def _template(self, wanted: str | None, *, has_tools: bool) -> str:
        """The text of the template to use."""
        if wanted is not None and not isinstance(wanted, str):
            raise TypeError(f"chat_template: expected a text, got {type(wanted).__name__}")
        if wanted is not None:
            return self.templates.get(wanted, wanted)
        name = "tool_use" if has_tools and "tool_use" in self.templates else "default"
        if name in self.templates:
            return self.templates[name]
        names = ", ".join(sorted(self.templates))
        kind = f"default template (it has {names})" if names else "chat template"
        raise ValueError(
            f"chat_template: {self.source} has no {kind}; give one as chat_template "
            f"(--chat-template)"
        )

    def _rendered(self, text: str, variables: dict[str, Any], *, is_own: bool) -> str:
        try:
            return run_template(text, variables)
        except TemplateError as error:
            reason = visible(str(error))
            if is_own:
                raise CheckpointError(f"{self.source}: chat template, {reason}") from None
            raise ValueError(f"chat_template: not valid Jinja, {reason}") from None
        except TemplateFailure as error:
            raise ValueError(
                f"messages: the chat template fails on them: {visible(str(error))}"
            ) from None


def _joined(kwargs: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """Bring both ways to name a template's variables together."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"chat_template_kwargs: expected a dict, got {type(kwargs).__name__}")
    named = dict(kwargs or {})
    for name in named:
        if name in _OWN_NAMES or name in more:
            where = "an argument of its own" if name in _OWN_NAMES else "given twice"
            raise ValueError(f"chat_template_kwargs: {shown(name)} is {where}")
    return {name: _plain(name, value) for name, value in {**named, **more}.items()}


def _text(file: Path) -> str:
    try:
        return read_text(file, "utf-8-sig")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as UTF-8 text ({error})") from None


def _named_templates(value: Any, file: Path) -> dict[str, str]:
    """Templates of the configuration's field: a text, or a list of {"name", "template"}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in value
    ):
        return {entry["name"]: entry["template"] for entry in value}
    raise CheckpointError(
        f"{file}: chat_template: expected a text or a list of named ones, found {value!r:.80}"
    )


def _plain_list(name: str, value: Any) -> list[Any]:
    """Copy a list of dicts as plain data."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise TypeError(f"{name}: expected a list of dicts, got {type(value).__name__}")
    return [_plain(name, item) for item in value]


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Copy messages as plain data, without keys whose value is None."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages: expected a list of dicts, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages: expected at least one message, got none")
    copied = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(f"messages: expected dicts, got {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages: expected a role in each, got {shown(message.get('role'))}")
        given = {key: value for key, value in message.items() if value is not None}
        if isinstance(given.get("content"), list | tuple):
            given["content"] = "".join(_text_of(part) for part in given["content"])
        if "tool_calls" in given:
            given["tool_calls"] = [_parsed_call(call) for call in _calls(given["tool_calls"])]
        thoughts = next((given[key] for key in _REASONING_KEYS if key in given), None)
        if thoughts is not None:
            given = {"thinking": thoughts, **given, "reasoning_content": thoughts}
        copied.append(_plain("messages", given))
    return copied


def _text_of(part: Any) -> str:
    """Return the text of a part of a message's content."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise UnsupportedError(f"messages: content of type {shown(kind)}, only text is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise TypeError(f"messages: expected a text in each part, got {type(text).__name__}")
    return text


def _calls(calls: Any) -> Sequence[Any]:
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
        raise TypeError(f"messages: expected a list of tool_calls, got {type(calls).__name__}")
    return calls


def _parsed_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, where they are JSON text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(
            f"messages: tool_calls: expected arguments that are a JSON object, "
            f"got {shown(arguments)}"
        )
    parsed_function = {**function, "arguments": parsed}
    return {**call, "function": parsed_function} if "function" in call else parsed_function


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """Copy a value of JSON's types: a template gets nothing with methods of its own."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if depth == _MAX_DEPTH:
        raise ValueError(f"{name}: expected at most {_MAX_DEPTH} values inside each other")
    if isinstance(value, Mapping):
        if other := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{name}: expected texts as keys, got {shown(other[0])}")
        return {str(key): _plain(name, item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item, depth + 1) for item in value]
    raise TypeError(
        f"{name}: expected texts, numbers, lists and dicts only, got {type(value).__name__}"
    )


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the mark behind the text of the last message."""
    *before, last = messages
    content = last.get("content")
    if not isinstance(content, str):
        raise ValueError("continue_final_message: expected text in the last message, got none")
    return [*before, {**last, "content": f"{content}{_MARK} "}]


def _cut(rendered: str) -> str:
    """Cut a prompt at the mark."""
    kept, mark, rest = rendered.rpartition(_MARK)
    if not mark:
        raise ValueError(
            "continue_final_message: the chat template does not show the last message as it is"
        )
    return kept if rest.startswith(" ") else kept.rstrip()
