"""Standard streams as they should not be, and terminals of no size."""

from __future__ import annotations

import contextlib
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.fake_engine import FakeLLM, ScriptedStep
from hybridspec.cli import main
from hybridspec.cli.render import PlainConsole
from hybridspec.cli.report import _reports_as_json
from hybridspec.speculate import Logprob


@contextlib.contextmanager
def closed(name: str) -> Iterator[None]:
    """Close a standard stream as `>&-` in a shell does, which Python shows as None."""
    original = getattr(sys, name)
    setattr(sys, name, None)
    try:
        yield
    finally:
        stand_in = getattr(sys, name)
        setattr(sys, name, original)
        stand_in.close()


@pytest.mark.parametrize("words", [("generate", "say"), ("generate", "say", "--json"), ("info",)])
def test_a_closed_output_is_no_failure(fake: FakeLLM, words: tuple[str, ...]) -> None:
    with closed("stdout"):
        assert main(words) == 0


def test_mistakes_stay_off_the_output_where_the_stream_for_errors_is_closed(
    cli: Callable,
) -> None:
    with closed("stderr"):
        outcome = cli("generate", "--no-such-flag")
    assert (outcome.status, outcome.out) == (2, "")


def test_a_closed_input_is_an_empty_one(cli: Callable, fake: FakeLLM) -> None:
    with closed("stdin"):
        outcome = cli("generate", "-")
        assert outcome.status == 2
        assert "standard input: expected a prompt, got an empty one" in outcome.err
        assert cli("generate", "--chat").status == 0


def test_questions_are_utf8_in_every_locale(
    cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, status in ((b"caf\xc3\xa9\n", 0), (b"caf\xe9\n", 2)):
        stdin = io.TextIOWrapper(io.BytesIO(text), encoding="ascii", errors="surrogateescape")
        monkeypatch.setattr(sys, "stdin", stdin)
        assert cli("generate", "--chat").status == status
    assert fake.chats[-1][0][-1] == {"role": "user", "content": "caf\xe9"}


@pytest.mark.parametrize("columns", ["0", "1"])
def test_a_terminal_without_columns_shows_all(
    cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    shown = cli("generate", "say").out
    monkeypatch.setenv("COLUMNS", columns)
    assert PlainConsole().width > 0
    assert "tokens per step: " in shown
    assert cli("generate", "say").out == shown


def test_eight_bit_controls_do_not_reach_a_terminal(cli: Callable, fake: FakeLLM) -> None:
    fake.script = [ScriptedStep(drafted="\x9b2J", accepted=3, then="\x85")]
    assert "\ufffd2J\ufffd" in cli("generate", "say").out


def test_json_has_no_numbers_that_json_lacks() -> None:
    """A broken checkpoint's logits are NaN."""
    reports = [{3: Logprob(logprob=math.nan, rank=1), 4: Logprob(logprob=-math.inf, rank=2)}]
    [[first, second]] = _reports_as_json(SimpleNamespace(tokenizer=None), reports)
    assert first["logprob"] is None
    assert json.loads(json.dumps(second, allow_nan=False))["logprob"] is None


def test_an_empty_pipe_is_no_prompt(tmp_path: Path) -> None:
    """It was meant to be one, so the package's own does not take its place."""
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    for source in (subprocess.PIPE, empty.open("rb")):
        with subprocess.Popen(
            [sys.executable, "-m", "hybridspec", "generate"],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            out, err = process.communicate("" if source == subprocess.PIPE else None, timeout=120)
        assert (process.returncode, out) == (2, "")
        assert err == ("hybridspec: error: standard input: expected a prompt, got an empty one\n")
        if source != subprocess.PIPE:
            source.close()


def test_a_byte_order_mark_is_no_part_of_a_prompt(
    cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"\xef\xbb\xbfsay")
    cli("generate", "--prompt-file", str(file))
    cli("generate", "\ufeffsay")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    cli("generate", "-")
    assert fake.prompts == [[ord(letter) for letter in "say"]] * 3
    template = tmp_path / "template"
    template.write_bytes(b"\xef\xbb\xbf{{ messages }}")
    stdin = io.TextIOWrapper(io.BytesIO(file.read_bytes()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    cli("generate", "--chat", "--chat-template", str(template))
    [(messages, options)] = fake.chats
    assert messages[0]["content"] == "say"
    assert options == {"chat_template": "{{ messages }}"}
    file.write_bytes(b"\xef\xbb\xbf")
    assert "got an empty one" in cli("generate", "--prompt-file", str(file)).err
