"""Where a prompt comes from."""

from __future__ import annotations

import argparse
import os
import re
import select
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from hybridspec.bundled import held_out_prompts
from hybridspec.cli.usage import UsageError

__all__ = ["Prompt", "parse_token_ids", "read_prompt"]

_WAIT_FOR_PIPE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as text or as token ids, and where it came from.

    Attributes:
        text: the text, or None if token ids were given.
        token_ids: the token ids, or None if text was given.
        source: what to call it where it was not typed by the user, else None.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    source: str | None = None


def read_prompt(arguments: argparse.Namespace) -> Prompt:
    """Return the prompt that the flags name.

    Raises:
        UsageError: if there is none, more than one, or an empty one.
        OSError: if a file cannot be read.
    """
    given = {
        "PROMPT": arguments.prompt,
        "--prompt-file": arguments.prompt_file,
        "--prompt-token-ids": arguments.prompt_token_ids,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)}: give one of them")
    if arguments.prompt_token_ids is not None:
        return Prompt(token_ids=parse_token_ids(arguments.prompt_token_ids))
    if arguments.prompt_file is not None:
        if not arguments.prompt_file:
            raise UsageError("--prompt-file: expected a file, got an empty name")
        file = Path(arguments.prompt_file)
        return Prompt(text=_decoded(file.read_bytes(), str(file)), source=file.name)
    if arguments.prompt == "-":
        return Prompt(text=_decoded(sys.stdin.buffer.read(), "standard input"))
    if arguments.prompt is not None:
        return Prompt(text=_decoded(os.fsencode(arguments.prompt), "PROMPT"))
    piped = _piped_text()
    if piped is not None:
        return Prompt(text=_decoded(piped, "standard input"))
    if arguments.model is not None:
        raise UsageError("PROMPT: needed with --model; - reads standard input")
    held_out = held_out_prompts("code")[0]
    return Prompt(text=held_out.text, source=held_out.source)


def _decoded(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")  # a byte order mark is no part of a prompt
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: expected UTF-8 text ({error.reason})") from None
    if not text:
        raise UsageError(f"{name}: expected a prompt, got an empty one")
    return text


def parse_token_ids(text: str) -> list[int]:
    """Return the numbers of --prompt-token-ids; raises UsageError if there are none."""
    words = re.split(r"\s*,\s*|\s+", text.strip())
    if words == [""]:
        raise UsageError("--prompt-token-ids: expected token ids, got none")
    try:
        return [int(word) for word in words]
    except ValueError:
        raise UsageError(
            f"--prompt-token-ids: expected whole numbers with commas between, got {text!r}"
        ) from None


def _piped_text() -> bytes | None:
    """Return what a pipe or file on standard input holds, None if there is no such thing.

    A pipe that stays silent is left alone after a moment: a program that starts this one may hold
    the other end open without ever writing to it.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
            return None
        if not select.select([sys.stdin], [], [], _WAIT_FOR_PIPE_S)[0]:
            print(
                "hybridspec: nothing came from standard input; PROMPT - waits for it",
                file=sys.stderr,
            )
            return None
        return sys.stdin.buffer.read()
    except (OSError, ValueError, AttributeError):  # closed, replaced, or not selectable
        return None
