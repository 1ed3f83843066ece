"""Several continuations and log-probabilities, on the model that comes with the package."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

PROMPT = ("generate", "import os\n", "--max-tokens", "12")


def document(cli: Callable, *words: str) -> dict[str, Any]:
    outcome = cli(*PROMPT, *words, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    return json.loads(outcome.out)


def test_several_continuations(cli: Callable) -> None:
    sampling = ("--temperature", "1", "--seed", "4")
    single = document(cli, *sampling)
    several = document(cli, *sampling, "--n", "3")
    texts = [one["text"] for one in several["continuations"]]
    assert texts[0] == several["text"] == single["text"]
    assert len(set(texts)) == 3
    assert several["usage"]["completion_tokens"] == 36
    assert several["memory"]["bytes_per_request"] == 3 * single["memory"]["bytes_per_request"]
    assert "continuations" not in single
    shown = cli(*PROMPT, *sampling, "--n", "3").out
    for number, text in enumerate(texts, start=1):
        assert f"continuation {number} of 3 (ended by length)\n{text}\n" in shown
    assert "tokens: 36 after a prompt of 11 (ended by length, length, length)" in shown
    traced = document(cli, *sampling, "--n", "3", "--trace")["steps"]
    assert {step["index"] for step in traced} == {0, 1, 2}


def test_logprobs(cli: Callable) -> None:
    found = document(cli, "--logprobs", "2", "--prompt-logprobs", "0")
    assert len(found["logprobs"]) == 12
    for token, report in zip(found["token_ids"], found["logprobs"], strict=True):
        assert [entry["rank"] for entry in report] == [1, 2]
        assert report[0]["token_id"] == token
        assert report[0]["text"] == chr(token)
        assert sum(math.exp(entry["logprob"]) for entry in report) <= 1
    assert found["prompt_logprobs"][0] is None
    assert "".join(report[0]["text"] for report in found["prompt_logprobs"][1:]) == "import os\n"
    assert "logprobs" not in document(cli)
    two = document(cli, "--logprobs", "0", "--n", "2")["logprobs"]
    assert [len(reports) for reports in two] == [12, 12]


def test_logprobs_as_text(cli: Callable) -> None:
    lines = cli(*PROMPT, "--logprobs", "1", "--prompt-logprobs", "1", "--quiet").out.splitlines()
    heading = "log-probability, rank, token, most likely tokens: "
    start = lines.index(f"{heading}prompt")
    assert [line.split()[2] for line in lines[start + 1 : start + 4]] == ['"i"', '"m"', '"p"']
    start = lines.index(f"{heading}continuation 1")
    assert len(lines[start + 1 :]) == 12
    assert all(line.split()[1] == "1" for line in lines[start + 1 :])


def test_logit_bias(cli: Callable) -> None:
    usual = document(cli)
    first = usual["token_ids"][0]
    biased = document(cli, "--logit-bias", f"{first}:-100", "--logit-bias", "90:50")
    assert biased["token_ids"] == [90] * 12
    assert cli(*PROMPT, "--logit-bias", "272:1").err == (
        "hybridspec: error: logit_bias: expected ids below the vocabulary size 272, got 272\n"
    )
