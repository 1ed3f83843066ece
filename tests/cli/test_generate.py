"""`hybridspec generate` shows what the engine reports, in the form that was asked for."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.fake_engine import FakeLLM, ScriptedStep
from hybridspec.cli import generate, prompts

TEXT = "abcdef\nz"


def test_plain_output_is_the_text_and_the_facts(cli: Callable, fake: FakeLLM) -> None:
    outcome = cli("generate", "say")
    assert outcome.status == 0
    assert outcome.err == ""
    text, _, facts = outcome.out.partition("\n\n")
    assert text == TEXT
    assert facts.splitlines() == [
        "tokens: 8 after a prompt of 3 (ended by length)",
        "tokens per second: 5 in 1.50 s",
        "tokens per step: 2.33 committed of at most 4 (steps: 3, folds: 1)",
        "accepted by position: 1: 67 %   2: 33 %   3: 33 %",
        "memory of the request: 2.1 KiB here, 4.1 KiB with state snapshots",
    ]
    assert "\x1b" not in outcome.out


def test_quiet_is_the_text_only(cli: Callable, fake: FakeLLM) -> None:
    assert cli("generate", "say", "--quiet").out == TEXT + "\n"


def test_json_is_one_object(cli: Callable, fake: FakeLLM) -> None:
    outcome = cli("generate", "say", "--json", "--seed", "5")
    document = json.loads(outcome.out)
    assert outcome.out.count("\n") == 1
    assert document["text"] == TEXT
    assert document["token_ids"] == [ord(character) for character in TEXT]
    assert document["finish_reason"] == "length"
    assert document["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert document["committed_per_step"] == [4, 2, 1]
    assert document["acceptance_by_position"] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert document["tokens_per_second"] == pytest.approx(7 / 1.5)
    assert document["memory"] == {
        "bytes_per_request": 2048 + 110,
        "bytes_per_request_with_snapshots": 4096 + 110,
        "bytes_of_keys_and_values_in_both": 110,
    }
    assert document["seed"] == 5
    assert "steps" not in document


def test_json_without_speculation_has_the_same_fields(cli: Callable, fake: FakeLLM) -> None:
    with_drafts = json.loads(cli("generate", "say", "--json").out)
    fake.draft_tokens = 0
    fake.script = [ScriptedStep(drafted="", accepted=0, then=c) for c in "bc"]
    document = json.loads(cli("generate", "say", "--json", "--no-speculation").out)
    assert document.keys() == with_drafts.keys()
    assert document["committed_per_step"] == [1, 1]
    assert document["acceptance_by_position"] == []


def test_json_of_a_prefill_alone_has_no_speed(cli: Callable, fake: FakeLLM) -> None:
    fake.script = []
    document = json.loads(cli("generate", "say", "--json", "--max-tokens", "1").out)
    assert document["committed_per_step"] == []
    assert document["tokens_per_second"] is None


def test_json_with_trace_holds_the_steps(cli: Callable, fake: FakeLLM) -> None:
    steps = json.loads(cli("generate", "say", "--json", "--trace").out)["steps"]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert steps[2] == {
        "index": 0,
        "step": 2,
        "drafted": [ord("f"), ord("x"), ord("y")],
        "token_ids": [ord("f"), ord("\n")],
        "origins": ["accepted", "recovered"],
        "history_len": 4,
        "is_fold": False,
        "expected_tokens": None,
    }


def test_trace_shows_every_step(cli: Callable, fake: FakeLLM) -> None:
    lines = [line.rstrip() for line in cli("generate", "say", "--trace").out.splitlines()]
    assert lines[:5] == [
        "step history fold  drafted         accepted  then",
        '   0                                         prefill   "a"',
        '   1       0       "b" "c" "d"     3 of 3    bonus     "e"',
        '   2       4       "f" "x" "y"     1 of 3    recovered "\\n"',
        '   3      15 fold  "g" "h" "i"     0 of 3    recovered "z"  length',
    ]
    assert lines[6:8] == TEXT.split("\n")


def test_a_step_that_an_end_cut_shows_no_own_token(cli: Callable, fake: FakeLLM) -> None:
    fake.script = [ScriptedStep(drafted="bcd", accepted=2, then="")]
    lines = cli("generate", "say", "--trace").out.splitlines()
    assert lines[2].split() == ["1", "0", '"b"', '"c"', '"d"', "2", "of", "3", "length"]


def test_ids_are_shown_without_a_tokenizer(cli: Callable, fake: FakeLLM) -> None:
    fake.tokenizer = None
    outcome = cli("generate", "--prompt-token-ids", "1, 2,3", "--quiet")
    assert outcome.out.split() == [str(ord(character)) for character in TEXT]
    assert "#98 #99 #100" in cli("generate", "--prompt-token-ids", "1", "--trace").out


def test_flags_reach_the_request(cli: Callable, fake: FakeLLM) -> None:
    flags = "--temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 3 --max-tokens 9"
    more = "--min-tokens 2 --stop-token-id 7 --stop-token-id 8 --ignore-eos"
    penalties = "--repetition-penalty 1.5 --frequency-penalty 0.25 --presence-penalty -1"
    words = [*flags.split(), *more.split(), *penalties.split(), "--bad-word", "no"]
    cli("generate", "say", *words, "--stop", "a b", "--stop", "c")
    [params] = fake.seen
    assert params == type(params)(
        temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=3, max_tokens=9, min_tokens=2,
        stop=("a b", "c"), stop_token_ids=(7, 8), ignore_eos=True,
        repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=-1.0, bad_words=("no",),
    )  # fmt: skip


def test_a_drawn_seed_is_shown_and_repeats(cli: Callable, fake: FakeLLM) -> None:
    outcome = cli("generate", "say", "--temperature", "1", "--json")
    seed = json.loads(outcome.out)["seed"]
    assert fake.seen[0].seed == seed is not None
    assert f"seed: {seed}" in cli("generate", "say", "--temperature", "1", "--seed", str(seed)).out


def test_greedy_needs_no_seed(cli: Callable, fake: FakeLLM) -> None:
    assert json.loads(cli("generate", "say", "--json").out)["seed"] is None


def test_prompt_from_a_file(cli: Callable, fake: FakeLLM, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("four", encoding="utf-8")
    outcome = cli("generate", "--prompt-file", str(file), "--json")
    assert json.loads(outcome.out)["usage"]["prompt_tokens"] == 4


def test_prompt_from_standard_input(
    cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    outcome = cli("generate", "-", "--json")
    assert json.loads(outcome.out)["usage"]["prompt_tokens"] == 5


def test_a_file_on_standard_input_is_read(
    cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("seven!!", encoding="utf-8")
    with file.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        outcome = cli("generate", "--json")
    assert json.loads(outcome.out)["usage"]["prompt_tokens"] == 7


def test_a_silent_pipe_is_not_waited_for(
    cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    monkeypatch.setattr(prompts, "_WAIT_FOR_PIPE_S", 0.01)
    reader, writer = os.pipe()
    with os.fdopen(reader) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        outcome = cli("generate", "--json")
    os.close(writer)
    assert outcome.status == 0
    assert "nothing came from standard input" in outcome.err
    assert json.loads(outcome.out)["usage"]["prompt_tokens"] == 512


def test_marked_text_keeps_origins_when_text_comes_late() -> None:
    from types import SimpleNamespace

    from hybridspec.cli.render import ACCEPTED, MarkedText

    pieces = {1: "a", 2: "", 3: "é", 4: "b"}
    detokenizer = SimpleNamespace(push=lambda ids: pieces[ids[0]], finish=lambda: "?")
    marked = MarkedText(detokenizer)  # type: ignore[arg-type]

    def step(ids: list[int], origins: list[str], text: str, finished: bool = False) -> object:
        return SimpleNamespace(token_ids=ids, origins=origins, text=text, finished=finished)

    first = marked.take(step([1, 2], ["prefill", "accepted"], ""))  # type: ignore[arg-type]
    second = marked.take(step([3, 4], ["accepted", "bonus"], "aéb?", True))  # type: ignore[arg-type]
    assert first.plain == ""
    assert second.plain == "aéb?"
    accepted = [second.plain[s.start : s.end] for s in second.spans if s.style == ACCEPTED]
    assert "".join(accepted) == "é"


def test_a_terminal_gets_marks_and_a_panel(fake: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    assert generate.run(arguments("say")) == 0
    shown = screen.getvalue()
    assert "\x1b[32mb\x1b[0m" in shown
    assert "╭" in shown
    assert "the model's own tokens" in shown


def test_no_color_leaves_the_underline(fake: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = terminal(monkeypatch)
    generate.run(arguments("say"))
    assert "\x1b[4mb\x1b[0m" in screen.getvalue()
    assert "32" not in screen.getvalue()


def test_control_characters_do_not_reach_a_terminal(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = terminal(monkeypatch)
    fake.script = [ScriptedStep(drafted="\x1b]0;x\x07", accepted=6, then="\r")]
    generate.run(arguments("p\x1b[2J"))
    assert "\x1b]" not in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()
    assert "␛" in screen.getvalue()


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Make standard output something that rich takes for a colour terminal."""
    screen = io.StringIO()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    return screen


def arguments(*words: str) -> object:
    """Parse flags of generate."""
    from hybridspec.cli.arguments import parse

    return parse(["generate", *words])
