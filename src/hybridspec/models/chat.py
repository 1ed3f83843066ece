"""From messages to a prompt, with a checkpoint's own chat template.

Templates are programs written in Jinja that come with a checkpoint. They run in Jinja's sandbox and
see plain data only, and render as `apply_chat_template` of transformers renders them.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hybridspec.errors import CheckpointError, UnsupportedError

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
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
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
        config = {**_read(folder / "special_tokens_map.json"), **_read(config_file)}
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
        found = {name: _text(file) for name, file in files.items() if file.is_file()}
        return cls(found or templates, variables, str(folder))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Render one conversation.

        Args:
            messages: with "role" and "content" each, oldest first; content is a text, or a list of
                {"type": "text", "text": ...}.
            tools: JSON schemas of functions that the model may call.
            chat_template: a template, or the name of one of the checkpoint's; None takes the
                checkpoint's: "tool_use" with tools if there is one, else "default".
            add_generation_prompt: whether to open the assistant's answer at the end.
            continue_final_message: end inside the last message, for the model to go on with it.
            template_kwargs: what else the template looks at, such as `enable_thinking`.

        Raises:
            ValueError: if there is no template, or the template refuses the messages.
            TypeError: if messages or tools are not plain data.
            UnsupportedError: if a message holds something other than text.
            CheckpointError: if the checkpoint's template is not valid Jinja.
        """
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
            **{name: _plain(name, value) for name, value in template_kwargs.items()},
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
        names = ", ".join(sorted(self.templates)) or "none"
        raise ValueError(
            f"chat_template: {self.source} has no default template (it has {names}); "
            f"give one as chat_template"
        )

    def _rendered(self, text: str, variables: dict[str, Any], *, is_own: bool) -> str:
        try:
            template = _compiled(text)
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {error.message}"
            if is_own:
                raise CheckpointError(f"{self.source}: chat template, {where}") from None
            raise ValueError(f"chat_template: not valid Jinja, {where}") from None
        try:
            return template.render(variables)
        except Exception as error:  # whatever a foreign program fails with
            raise ValueError(
                f"messages: the chat template fails on them: {str(error) or type(error).__name__}"
            ) from error


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except ValueError as error:
        raise CheckpointError(f"{file}: not UTF-8 text ({error})") from None


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
            raise ValueError(f"messages: expected a role in each, got {message.get('role')!r}")
        given = {key: value for key, value in message.items() if value is not None}
        for part in given["content"] if isinstance(given.get("content"), list | tuple) else ():
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise UnsupportedError(
                    f"messages: content of type {kind!r}, only text is supported"
                )
        thoughts = next((given[key] for key in _REASONING_KEYS if key in given), None)
        if thoughts is not None:
            given = {"thinking": thoughts, **given, "reasoning_content": thoughts}
        copied.append(_plain("messages", given))
    return copied


def _plain(name: str, value: Any) -> Any:
    """Copy a value of JSON's types: a template gets nothing with methods of its own."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {_plain(name, key): _plain(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    raise TypeError(
        f"{name}: expected texts, numbers, lists and dicts only, got {type(value).__name__}"
    )


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the mark behind the text of the last message."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, list) and content:
        *parts, part = content
        return [*before, {**last, "content": [*parts, {**part, "text": f"{part['text']}{_MARK} "}]}]
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


class _Generation(Extension):
    """`{% generation %}`, which marks an assistant's words for training; renders what it holds."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=32)
def _compiled(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(text)
