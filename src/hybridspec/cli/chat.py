"""`hybridspec generate --chat`: a conversation, line by line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridspec.cli import loading, report
from hybridspec.cli.prompts import Prompt, read_prompt
from hybridspec.cli.usage import UsageError, usage_errors

if TYPE_CHECKING:
    from hybridspec import SamplingParams

__all__ = ["questions", "run", "template_options"]

_EXIT = "/exit"
# Of LLM.stream_chat's arguments, those that are no matter of a template and those that are flags.
_OWN_NAMES = ("self", "messages", "sampling_params", "chat_template", "chat_template_kwargs")
_FLAGS = ("add_generation_prompt", "continue_final_message")


def run(arguments: argparse.Namespace, params: SamplingParams) -> int:
    """Answer question after question, each with all that was said before; returns 0.

    Raises:
        UsageError: if the flags do not go together, the model has no chat template, or the
            conversation no longer fits the context.
    """
    if arguments.prompt_token_ids is not None:
        raise UsageError("--prompt-token-ids: a conversation is made of text (--chat)")
    if params.n > 1:
        raise UsageError(f"--n: expected 1 in a conversation (--chat), got {params.n}")
    options = template_options(arguments)
    llm = loading.open_engine(arguments)
    loading.warm_up(llm)
    messages: list[dict[str, str]] = []
    if arguments.system is not None:
        messages.append({"role": "system", "content": arguments.system})
    for question in questions(arguments):
        messages.append({"role": "user", "content": question})
        with usage_errors():
            steps = llm.stream_chat(messages, params, **options)
        result = report.report(arguments, llm, params, Prompt(), steps)
        messages.append({"role": "assistant", "content": result.output.outputs[0].text})
    return 0


def template_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the chat template that the flags name.

    Raises:
        UsageError: if a flag is no NAME=VALUE, or the template is no text.
        OSError: if the template's file cannot be read.
    """
    options: dict[str, Any] = {}
    for word in arguments.template_args:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--template-arg: expected NAME=VALUE, got {word!r}")
        if name in options:
            raise UsageError(f"--template-arg: expected each name once, got {name} twice")
        if name in _OWN_NAMES:
            raise UsageError(f"--template-arg: expected another name than {name}, got {word!r}")
        try:
            options[name] = json.loads(value)
        except (ValueError, RecursionError):
            options[name] = value
    for name in _FLAGS:
        if not isinstance(options.get(name, True), bool):
            raise UsageError(
                f"--template-arg: expected true or false as {name}, got {options[name]!r}"
            )
    if not isinstance(options.get("tools"), list | None):
        raise UsageError(f"--template-arg: expected a list as tools, got {options['tools']!r}")
    template = arguments.chat_template
    if template == "":
        raise UsageError("--chat-template: expected a file or a name, got an empty one")
    if template is not None:
        file = Path(template)
        is_name = template.isidentifier() and not file.exists()
        options["chat_template"] = template if is_name else _text(file)
    return options


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: expected UTF-8 text ({error.reason})") from None


def questions(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield what the user says: PROMPT or the prompt's file first, then lines until the end.

    Empty lines are left out; /exit ends it.

    Raises:
        UsageError, OSError: if the first question cannot be read, or the input is no UTF-8.
    """
    if arguments.prompt is not None or arguments.prompt_file is not None:
        first = read_prompt(arguments).text
        assert first is not None  # token ids are refused before
        yield first
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            line = input("> ") if is_terminal else _next_line()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input: expected UTF-8 text ({error.reason})") from None
        if line.strip() == _EXIT:
            return
        if line.strip():
            yield line


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n").removeprefix("\ufeff")
