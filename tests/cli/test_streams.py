"""Standard streams as they should not be, and terminals of no size."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from helpers.fake_engine import FakeLLM, ScriptedStep
from hybridspec.cli import main
from hybridspec.cli.generate import _reports_as_json
from hybridspec.cli.render import PlainConsole
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
