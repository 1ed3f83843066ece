"""`hybridspec compare` tells whether tokens are the same and how the times relate."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from helpers.fake_engine import SCRIPT, FakeLLM, ScriptedStep
from hybridspec.bundled import held_out_prompts
from hybridspec.cli import loading
from hybridspec.cli.compare import Pair, first_difference
from hybridspec.speculate.logprobs import Logprob

PLAIN = [ScriptedStep(drafted="", accepted=0, then=c) for c in "bcdef\nz"]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeLLM]:
    """Two scripted engines by draft tokens: 7 plain steps against 3 with drafts, same tokens."""
    found = {
        0: FakeLLM(script=PLAIN, draft_tokens=0, step_s=0.25),
        3: FakeLLM(script=SCRIPT, draft_tokens=3, step_s=0.5),
    }

    def open_engine(arguments: argparse.Namespace, **overrides: object) -> FakeLLM:
        options = vars(arguments) | overrides
        return found[options["draft_tokens"]]

    monkeypatch.setattr(loading, "open_engine", open_engine)
    monkeypatch.setattr(loading, "warm_up", lambda llm: None)
    return found


def test_identical_tokens_and_the_ratio(cli: Callable, engines: dict[int, FakeLLM]) -> None:
    outcome = cli("compare", "one", "another")
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert lines[1].split() == ["'one'", "8", "4", "5", "1.17", "yes"]
    assert lines[2].split()[0] == "'another'"
    assert lines[4] == "tokens identical in all 2 runs"
    assert lines[5].startswith("speculative is 1.17 times as fast as plain decoding")
    assert lines[6] == "2.33 tokens per step of at most 4; accepted by position: 67 %, 33 %, 33 %"
    assert outcome.err == ""


def test_a_difference_is_shown_and_fails(cli: Callable, engines: dict[int, FakeLLM]) -> None:
    engines[3].script = [*SCRIPT[:2], ScriptedStep(drafted="ghi", accepted=0, then="!")]
    outcome = cli("compare", "one")
    assert outcome.status == 1
    assert "NO, from token 7" in outcome.out
    assert "tokens differ in 1 of 1 runs" in outcome.out


def test_json(cli: Callable, engines: dict[int, FakeLLM]) -> None:
    document = json.loads(cli("compare", "one", "--repeats", "2", "--json").out)
    assert document["identical"] is True
    assert document["ratio"] == pytest.approx((7 / 1.5) / (7 / 1.75))
    assert document["tokens_per_step"] == pytest.approx(7 / 3)
    assert len(document["runs"]) == 2
    assert document["runs"][0]["first_difference"] is None


def test_json_of_a_difference(cli: Callable, engines: dict[int, FakeLLM]) -> None:
    engines[0].script = PLAIN[:3]
    outcome = cli("compare", "one", "--json")
    document = json.loads(outcome.out)
    assert (outcome.status, document["identical"]) == (1, False)
    assert document["runs"][0]["first_difference"] == 4


def test_nothing_to_time_gives_no_ratio(cli: Callable, engines: dict[int, FakeLLM]) -> None:
    engines[0].script = engines[3].script = []
    assert json.loads(cli("compare", "one", "--json").out)["ratio"] is None
    assert "times as fast" not in cli("compare", "one").out


def test_the_order_alternates(
    cli: Callable, engines: dict[int, FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    real = FakeLLM.generate

    def generate(self: FakeLLM, *arguments: object, **options: object) -> object:
        order.append(self.draft_tokens)
        return real(self, *arguments, **options)

    monkeypatch.setattr(FakeLLM, "generate", generate)
    cli("compare", "one", "two", "three")
    assert order == [0, 3, 3, 0, 0, 3]


def test_prompts_as_token_ids(cli: Callable, engines: dict[int, FakeLLM]) -> None:
    for llm in engines.values():
        llm.tokenizer = None
    flags = ("--prompt-token-ids", "1,2,3", "--prompt-token-ids", "4 5")
    document = json.loads(cli("compare", *flags, "--json").out)
    assert [run["prompt"] for run in document["runs"]] == ["1,2,3", "4 5"]
    assert engines[0].prompts == [[1, 2, 3], [4, 5]]
    assert engines[3].prompts == [[1, 2, 3], [4, 5]] * 2  # checked before any of them runs
    assert document["identical"] is True


def test_default_prompts_are_spread_over_the_held_out_texts(
    cli: Callable, engines: dict[int, FakeLLM]
) -> None:
    document = json.loads(cli("compare", "--json", "--num-prompts", "4").out)
    known = [prompt.source for prompt in held_out_prompts("code")]
    chosen = [run["prompt"] for run in document["runs"]]
    assert chosen == [known[i * len(known) // 4] for i in range(4)]
    docs = json.loads(cli("compare", "--json", "--kind", "docs", "--num-prompts", "1").out)
    assert docs["runs"][0]["prompt"] == held_out_prompts("docs")[0].source


@pytest.mark.parametrize(
    "words",
    [
        ("--draft-tokens", "0"),
        ("--drafter", "none"),
        ("",),
        ("--num-prompts", "1000"),
        ("--max-tokens", "0"),
        ("--prompt-token-ids", "1,x"),
        ("--prompt-token-ids", ""),
        ("--prompt-token-ids", "1,,2"),
        ("--prompt-token-ids", "1,2", "and a text"),
    ],
)
def test_wrong_calls(cli: Callable, engines: dict[int, FakeLLM], words: tuple[str, ...]) -> None:
    outcome = cli("compare", *words)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("hybridspec: error: ")


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1], [1, 2], 1),
        ([1, 2], [], 0),
    ],
)
def test_first_difference(left: list[int], right: list[int], expected: int | None) -> None:
    assert first_difference(left, right) == expected


def test_bits_are_compared(cli: Callable) -> None:
    outcome = cli(
        "compare", "import os", "--exact", "bitwise", "--max-tokens", "12", "--ignore-eos"
    )
    said = re.search(r"log-probabilities: ([\d,]+) compared bit for bit, 0 differ", outcome.out)
    assert int(said[1].replace(",", "")) % 12 == 0
    assert outcome.status == 0


def test_a_bit_that_differs_is_counted() -> None:
    def output(*reports: dict[int, float]) -> SimpleNamespace:
        named = [{token: Logprob(value, 1) for token, value in one.items()} for one in reports]
        return SimpleNamespace(outputs=[SimpleNamespace(logprobs=named)])

    plain = output({1: -0.5, 2: -1.0}, {3: -0.25, 4: -2.0})
    other = output({1: -0.5, 2: -1.0 - 2**-52}, {3: -0.25, 5: -2.0})
    pair = Pair(name="", plain=plain, speculative=other, is_synthetic=False)  # type: ignore[arg-type]
    assert pair.logprobs == (5, 3)
    assert dataclasses.replace(pair, speculative=plain).logprobs == (4, 0)
