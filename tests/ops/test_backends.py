"""The choice of a backend: explicit or not, and what is said when there is none."""

from __future__ import annotations

import logging

import pytest

from hybridspec.errors import UnsupportedError
from hybridspec.ops._backends import always, choose_backend

FUSSY = {"fast": lambda x: None if x > 0 else f"x is {x}", "plain": always}


def test_auto_takes_the_first_that_serves() -> None:
    assert choose_backend("op", "auto", FUSSY, 1) == "fast"
    assert choose_backend("op", "auto", FUSSY, -1) == "plain"


def test_an_explicit_choice_works_or_raises_with_the_reason() -> None:
    assert choose_backend("op", "plain", FUSSY, 1) == "plain"
    assert choose_backend("op", "fast", FUSSY, 1) == "fast"
    with pytest.raises(UnsupportedError, match="op: backend 'fast' cannot serve this call: x is 0"):
        choose_backend("op", "fast", FUSSY, 0)


def test_an_unknown_name_is_a_wrong_call() -> None:
    text = "backend: expected one of 'auto', 'fast', 'plain' for op, got 'slow'"
    with pytest.raises(ValueError, match=text):
        choose_backend("op", "slow", FUSSY, 1)


def test_auto_says_why_nothing_serves() -> None:
    only = {"fast": FUSSY["fast"], "other": lambda x: "no device"}
    text = r"op: no backend serves this call \(fast: x is 0; other: no device\)"
    with pytest.raises(UnsupportedError, match=text):
        choose_backend("op", "auto", only, 0)


def test_each_automatic_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hybridspec"):
        for x in (1, -1, 2, -2):
            choose_backend("logged_op", "auto", FUSSY, x)
    assert caplog.messages == ["logged_op: backend fast", "logged_op: backend plain"]
