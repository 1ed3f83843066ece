"""Ways to run the command line inside the test process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from helpers.fake_engine import FakeLLM
from hybridspec.cli import loading, main


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit status and what was printed."""

    status: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a command line; nothing is a terminal here."""

    def run(*argv: str) -> Outcome:
        status = main(argv)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """Put a scripted engine in place of the real one."""
    llm = FakeLLM()
    monkeypatch.setattr(loading, "open_engine", lambda arguments, **overrides: llm)
    monkeypatch.setattr(loading, "warm_up", lambda llm: None)
    return llm
