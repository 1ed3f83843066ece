"""The commands on the model that comes with the package: what a first user runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybridspec.bundled import PROMPT_KINDS, bundled_model_path, held_out_prompts

LENGTH = ("--max-tokens", "40")


def document(cli: Callable, *words: str) -> dict[str, Any]:
    """Run with --json and return the object; nothing else may be printed."""
    outcome = cli(*words, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    return json.loads(outcome.out)


@pytest.fixture
def no_input(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing on standard input, as when started from a terminal."""
    with open("/dev/null") as null:
        monkeypatch.setattr("sys.stdin", null)
        yield


@pytest.mark.parametrize(
    "sampling", [(), ("--temperature", "0.8", "--top-p", "0.95", "--seed", "7")], ids=str
)
def test_speculation_changes_nothing_but_the_steps(
    cli: Callable, no_input: None, sampling: tuple[str, ...]
) -> None:
    with_drafts = document(cli, "generate", *LENGTH, *sampling)
    plain = document(cli, "generate", *LENGTH, *sampling, "--no-speculation")
    assert with_drafts.keys() == plain.keys()
    for name in ("text", "token_ids", "finish_reason", "usage"):
        assert with_drafts[name] == plain[name]
    assert len(plain["token_ids"]) == 40
    assert plain["committed_per_step"] == [1] * 39
    assert sum(with_drafts["committed_per_step"]) == 39
    assert len(with_drafts["committed_per_step"]) < 30
    assert len(with_drafts["acceptance_by_position"]) == 3
    assert all(0.3 < rate <= 1 for rate in with_drafts["acceptance_by_position"])
    assert with_drafts["tokens_per_second"] > 0
    assert with_drafts["usage"]["prompt_tokens"] == 513  # and the token before a text


def test_every_draft_length_gives_the_same_text(cli: Callable) -> None:
    texts = {
        document(cli, "generate", "import os\n", *LENGTH, "--draft-tokens", str(k))["text"]
        for k in range(8)
    }
    assert len(texts) == 1


def test_streamed_text_equals_that_of_json(cli: Callable) -> None:
    prompt = "    def write(self, data):\n"
    text = document(cli, "generate", prompt, *LENGTH)["text"]
    assert cli("generate", prompt, *LENGTH, "--quiet").out == text + "\n"
    trace = cli("generate", prompt, *LENGTH, "--trace").out
    assert f"\n\n{text}\n\n" in trace


def test_a_stop_string_ends_the_text_before_it(cli: Callable) -> None:
    prompt = "def main():\n"
    whole = document(cli, "generate", prompt, *LENGTH)["text"]
    stop = whole[10:13]
    stopped = document(cli, "generate", prompt, *LENGTH, "--stop", stop)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == whole[: whole.index(stop)]


def test_text_beyond_ascii_goes_in_and_out(cli: Callable) -> None:
    outcome = document(cli, "generate", "# naïve café ✓ 模型\n", "--max-tokens", "4")
    assert outcome["usage"]["prompt_tokens"] == 1 + len("# naïve café ✓ 模型\n".encode())


def test_a_trace_shows_folds_and_rejections(cli: Callable, no_input: None) -> None:
    traced = document(cli, "generate", "--max-tokens", "128", "--trace")
    steps, counters = traced["steps"], traced["counters"]
    assert counters["folds"] >= sum(step["is_fold"] for step in steps)
    assert counters["generated_tokens"] >= sum(len(step["token_ids"]) for step in steps)
    assert any(step["is_fold"] for step in steps)
    assert any("recovered" in step["origins"] for step in steps)
    assert any("bonus" in step["origins"] for step in steps)
    for before, step in zip(steps[1:], steps[2:], strict=False):
        kept = 0 if before["is_fold"] else before["history_len"]
        assert step["history_len"] == kept + len(before["token_ids"])
        assert step["is_fold"] == (step["history_len"] + len(step["drafted"]) + 1 > 16)


def test_compare_finds_the_same_tokens(cli: Callable) -> None:
    outcome = cli("compare", "--num-prompts", "2", "--max-tokens", "24", "--json")
    found = json.loads(outcome.out)
    assert (outcome.status, found["identical"]) == (0, True)
    assert found["ratio"] > 0
    assert [run["num_tokens"] for run in found["runs"]] == [24, 24]


def test_info_knows_the_model(cli: Callable) -> None:
    info = document(cli, "info")
    assert info["model"] == str(bundled_model_path())
    assert info["layer_kinds"].count("gdn") == 6
    assert 3e6 < info["num_parameters"] < 4e6
    assert info["has_mtp"] is True
    # 6 layers x 4 heads x 64 x 64 fp32: the state, and what four verified rows would snapshot
    assert info["request_bytes"]["GDN state"] == 6 * 4 * 64 * 64 * 4
    assert info["snapshot_bytes"] == 4 * info["request_bytes"]["GDN state"]
    assert info["num_requests_fit"] >= 1
    assert all(backend["reason"] for backend in info["backends"].values())


def test_a_prompt_longer_than_the_context(cli: Callable) -> None:
    outcome = cli("generate", "x" * 5000)
    assert (outcome.status, outcome.out) == (2, "")
    assert "4096" in outcome.err
    assert "5001" in outcome.err


def test_the_bundled_files() -> None:
    assert (bundled_model_path() / "model.safetensors").stat().st_size <= 8_000_000
    for kind in PROMPT_KINDS:
        prompts = held_out_prompts(kind)
        assert len({prompt.text for prompt in prompts}) == len(prompts) >= 32
        assert len({prompt.source for prompt in prompts}) == len(prompts)
    with pytest.raises(ValueError, match="poems"):
        held_out_prompts("poems")
