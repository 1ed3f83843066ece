"""`hybridspec info` prints what the engine says of itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from helpers.fake_engine import FakeLLM
from hybridspec.cli.render import amount, percent


def test_facts(cli: Callable, fake: FakeLLM) -> None:
    outcome = cli("info")
    assert outcome.status == 0
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    for expected in (
        "type qwen3_5_text, 1,234,567 parameters",
        "layers 4: 3 Gated DeltaNet, 1 attention",
        "Gated DeltaNet 2 key heads of 64, 4 value heads of 64, convolution of 4",
        "gated_delta_rule reference: no GPU here",
        "GDN state 1.0 KiB",
        "keys and values 10 B a token, 9.8 KiB at 1,000 tokens",
        "together 2.0 KiB and keys and values",
        "with state snapshots 4.0 KiB and keys and values",
        "prefixes kept at most 5, 2.0 KiB each",
        "requests that fit 7 of 1,000 tokens",
    ):
        assert expected in lines


def test_long_facts_in_a_terminal(
    cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit stands below the value, not below the name."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", cli("info").out)
    row = "  Gated DeltaNet               2 key heads of 64, 4 value"
    assert f"{row}\n{'':31}heads of 64, convolution of 4\n" in plain


def test_snapshots_are_no_topic_without_drafts(cli: Callable, fake: FakeLLM) -> None:
    fake.draft_tokens = 0
    assert "snapshots" not in cli("info", "--no-speculation").out


def test_room_for_the_longest_request_in_every_slot(cli: Callable, fake: FakeLLM) -> None:
    fake.kv_layout = "contiguous"
    lines = [" ".join(line.split()) for line in cli("info").out.splitlines()]
    assert "keys and values contiguous, the longest request in every slot" in lines
    assert "keys and values 10 B a token, 9.8 KiB whatever the length" in lines
    document = json.loads(cli("info", "--json").out)
    assert (document["kv_layout"], document["attention_backend"]) == ("contiguous", "auto")


def test_json(cli: Callable, fake: FakeLLM) -> None:
    document = json.loads(cli("info", "--json").out)
    assert document["request_bytes"] == {"GDN state": 1024, "GDN ring": 512, "conv ring": 512}
    assert document["backends"]["gated_delta_rule"]["reason"] == "no GPU here"
    assert document["gdn"]["value_dim"] == 64
    assert document["num_requests_fit"] == 7


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (402_653, "393 KiB"),
        (75_497_472, "72.0 MiB"),
        (3 << 40, "3,072 GiB"),
    ],
)
def test_amounts(num_bytes: int, text: str) -> None:
    assert amount(num_bytes) == text


def test_percent() -> None:
    assert (percent(None), percent(0.666)) == ("-", "67 %")
