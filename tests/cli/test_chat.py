"""`hybridspec generate --chat`: questions come line by line, answers keep the history."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.ascii_tokenizer import END, write_ascii_tokenizer
from helpers.chat_templates import PLAIN, add_chat_files
from helpers.fake_engine import FakeLLM
from helpers.tiny_checkpoints import build_tiny_checkpoint

TESTS = Path(__file__).resolve().parent.parent
ANSWER = "abcdef\nz"
USER, ASSISTANT = "user", "assistant"


def say(monkeypatch: pytest.MonkeyPatch, text: str | bytes) -> None:
    """Put text on standard input."""
    data = text if isinstance(text, bytes) else text.encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def roles(messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_a_conversation_from_a_pipe(
    cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "How are you?\n\n   \nAnd now? \n")
    outcome = cli("generate", "--chat", "--system", "Be nice", "--temperature", "1", "--seed", "3")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == f"{ANSWER}\n" * 2
    assert [roles(messages) for messages, _ in fake.chats] == [
        [("system", "Be nice"), (USER, "How are you?")],
        [
            ("system", "Be nice"),
            (USER, "How are you?"),
            (ASSISTANT, ANSWER),
            (USER, "And now? "),
        ],
    ]
    assert [params.seed for params in fake.seen] == [3, 3]


@pytest.mark.parametrize("words", ["one\n/exit\ntwo\n", "one\n /exit \n", "one", "one\n"])
def test_the_end(cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    say(monkeypatch, words)
    assert cli("generate", "--chat").status == 0
    assert [roles(messages) for messages, _ in fake.chats] == [[(USER, "one")]]


def test_the_prompt_is_the_first_question(
    cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "question"
    file.write_text("two\nlines", encoding="utf-8")
    for words, first in (("zero",), "zero"), (("--prompt-file", str(file)), "two\nlines"):
        say(monkeypatch, "more\n")
        cli("generate", "--chat", *words)
        *_, (messages, _) = fake.chats
        assert roles(messages) == [(USER, first), (ASSISTANT, ANSWER), (USER, "more")]


def test_json_and_trace(cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "one\ntwo\n")
    lines = cli("generate", "--chat", "--json").out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == [ANSWER, ANSWER]
    say(monkeypatch, "one\n")
    traced = cli("generate", "--chat", "--trace").out
    assert traced.startswith("step history fold")
    assert traced.endswith(f"\n\n{ANSWER}\n")


def test_template_options(
    cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }}", encoding="utf-8")
    flags = ["enable_thinking=false", "mood=good", "limit=3", "url=a=b"]
    words = [word for flag in flags for word in ("--template-arg", flag)]
    for template, passed in ((str(file), "{{ messages }}"), ("tool_use", "tool_use")):
        say(monkeypatch, "one\n")
        cli("generate", "--chat", *words, "--chat-template", template)
        assert fake.chats[-1][1] == {
            "enable_thinking": False,
            "mood": "good",
            "limit": 3,
            "url": "a=b",
            "chat_template": passed,
        }


def test_input_that_is_no_text(
    cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, b"\xff\xfe\n")
    outcome = cli("generate", "--chat")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("hybridspec: error: standard input: expected UTF-8")
    assert outcome.err.count("\n") == 1


def test_a_terminal_is_asked(cli: Callable, fake: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """`input` does the asking there, which brings line editing."""
    said = iter(["one", "", "two"])
    asked = []

    def ask(prompt: str) -> str:
        asked.append(prompt)
        for line in said:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli("generate", "--chat").status == 0
    assert asked == ["> "] * 4
    assert [roles(messages)[-1] for messages, _ in fake.chats] == [(USER, "one"), (USER, "two")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    build_tiny_checkpoint(path, eos_token_id=END, seed=2)
    write_ascii_tokenizer(path)
    return path


def test_a_real_model(
    cli: Callable, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    """The answer is the one to the rendered history, and each error is one line."""
    words = ("generate", "--chat", "--model", str(folder), "--max-tokens", "9", "--json")
    say(monkeypatch, "Hello\n")
    outcome = cli(*words)
    assert (outcome.status, outcome.out) == (2, "")
    assert "chat_template: " in outcome.err and outcome.err.count("\n") == 1

    add_chat_files(folder, PLAIN)
    say(monkeypatch, "Hello\nWhy?\n")
    outcome = cli(*words)
    first, second = [json.loads(line) for line in outcome.out.splitlines()]
    prompt = "user: Hello<|end|>assistant:"  # this tokenizer has no token for a line feed
    assert first["usage"]["prompt_tokens"] == len("user: Hello") + 1 + len("assistant:")
    alone = cli("generate", prompt, *words[2:])
    assert json.loads(alone.out)["token_ids"] == first["token_ids"]
    history = first["usage"]["prompt_tokens"] + len(f" {first['text']}") + 1
    assert second["usage"]["prompt_tokens"] == history + len("user: Why?") + 1 + len("assistant:")

    say(monkeypatch, "Hello\nWhy?\n")
    outcome = cli(*words[:-1], "--max-model-len", "40")
    assert outcome.status == 2
    assert "context of 40" in outcome.err and outcome.err.count("\n") == 1
    assert outcome.out == first["text"] + "\n"  # what was answered before stays

    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('not today') }}", encoding="utf-8")
    say(monkeypatch, "Hello\n")
    outcome = cli(*words, "--chat-template", str(template))
    assert outcome.err == (
        "hybridspec: error: messages: the chat template fails on them: not today\n"
    )


def test_a_template_that_does_not_compile(
    cli: Callable, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    template = tmp_path / "broken.jinja"
    for text, said in (
        ("{% break %}", "chat_template: not valid Jinja, 'break' outside loop"),
        ("{{ 'a' * 3000000000 }}", "the chat template fails on them: it takes more than"),
    ):
        template.write_text(text, encoding="utf-8")
        say(monkeypatch, "Hello\n")
        flags = ("--model", str(folder), "--chat-template", str(template))
        outcome = cli("generate", "--chat", *flags)
        assert (outcome.status, outcome.out) == (2, "")
        assert said in outcome.err and outcome.err.count("\n") == 1


def test_an_answer_comes_before_the_next_question() -> None:
    """In a real process, over pipes that stay open."""
    code = f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        from helpers.fake_engine import FakeLLM
        from hybridspec.cli import loading, main

        loading.open_engine = lambda arguments: FakeLLM()
        loading.warm_up = lambda llm: None
        sys.exit(main(["generate", "--chat"]))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None and process.stdout is not None
    for question in ("one\n", "two\n"):
        process.stdin.write(question)
        process.stdin.flush()
        assert [process.stdout.readline() for _ in range(2)] == ["abcdef\n", "z\n"]
    process.stdin.write("/exit\n")
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
