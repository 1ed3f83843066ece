"""Documents name only files, targets, flags and identifiers that exist, in lines that fit."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hybridspec.cli import main
from hybridspec.cli.arguments import parse
from hybridspec.cli.parser import build_parser

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "src").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
        *(ROOT / "tests").rglob("*.md"),
    ]
)
GUIDES = [ROOT / "docs/integrating.md", *sorted((ROOT / "docs/integrating").glob("*.md"))]
CODE_FOLDERS = ("src", "tests", "tools", "benchmarks")
SUFFIXES = ("py", "md", "txt", "toml", "json", "jsonl", "safetensors", "yml", "csv")

# Words of other projects and of file formats, which documents explain but no code here spells.
FOREIGN = {
    "RING_SLOTS",
    "W_RING",
    "accept_len",
    "accept_lens",
    "assistant_model",
    "b_seq_len",
    "cache_base",
    "cache_indices",
    "commit_gdn_replayssm_spec",
    "d_cache",
    "draft_token_num",
    "fa3_utils",
    "flush_min",
    "g_cache",
    "hist_len",
    "initial_state_indices",
    "is_croppable",
    "is_flush",
    "max_cache_len",
    "max_spec_len",
    "mtp_step",
    "n_accepted",
    "null_block_id",
    "num_accepted_tokens",
    "num_computed_tokens",
    "num_speculative_tokens",
    "prompt_lookup_num_tokens",
    "query_start_loc",
    "replayssm_cache_base",
    "replayssm_d",
    "replayssm_g",
    "replayssm_is_flush",
    "replayssm_k",
    "replayssm_write_pos",
    "req_idx",
    "req_to_token_indexs",
    "save_pretrained",
    "speculative_num_steps",
    "ssm_state_indices",
    "use_mtp",
    "write_pos",
}


def words_of_the_code() -> set[str]:
    """Return every identifier-like word in the project's own code and settings."""
    files = [file for folder in CODE_FOLDERS for file in (ROOT / folder).rglob("*.py")]
    files += [ROOT / "pyproject.toml", ROOT / "Makefile", *(ROOT / "requirements").glob("*.txt")]
    files += (ROOT / "src/hybridspec/bundled").glob("*.json")
    files = [file for file in files if file != Path(__file__).resolve()]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", text))


WORDS = words_of_the_code()
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def option_strings() -> list[str]:
    """Return every flag of the command line."""
    commands = build_parser()._subparsers._group_actions[0].choices.values()
    return [flag for command in commands for flag in command._option_string_actions]


FLAGS = set(
    re.findall(
        r"--[a-z][a-z0-9-]*",
        "\n".join(
            file.read_text(encoding="utf-8")
            for pattern in ("tools/*.py", "scripts/*.py", "benchmarks/**/*.py", "tests/conftest.py")
            for file in ROOT.glob(pattern)
        ),
    )
) | set(option_strings())


def path_exists(path: str, document: Path) -> bool:
    """Return whether a path or pattern names something, seen from a likely folder."""
    bases = (ROOT, document.parent, ROOT / "src", ROOT / "src/hybridspec")
    path = path.rstrip("/")
    return any((base / path).exists() or any(base.glob(path)) for base in bases)


def complaint(span: str, document: Path) -> str | None:
    """Return what is wrong with one code span, or None if everything it names exists."""
    if span.startswith("make "):
        missing = [t for t in span.split()[1:] if "=" not in t and t not in TARGETS]
        return f"no make target {missing}" if missing else None
    if re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", span) and (
        span.endswith("/") or re.search(rf"\.({'|'.join(SUFFIXES)})$", span)
    ):
        return None if path_exists(span, document) else "no such file"
    unknown_flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", span)) - FLAGS
    if unknown_flags:
        return f"no flag {sorted(unknown_flags)}"
    return unknown_identifier(span)


def unknown_identifier(span: str) -> str | None:
    """Return a complaint if a span is a (dotted or called) identifier that no code spells."""
    match = re.fullmatch(r"([A-Za-z][\w.]*)(\(.*\))?", span)
    if match is None:
        return None
    parts = match[1].split(".")
    looks_like_code = match[2] or "_" in span or len(parts) > 1 or re.search(r"[a-z][A-Z]", span)
    unknown = [part for part in parts if part and part not in WORDS and part not in FOREIGN]
    return f"nothing is called {unknown}" if looks_like_code and unknown else None


def links(text: str) -> list[str]:
    """Return the local targets of a document's links, without anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [t.split("#")[0] for t in targets if not re.match(r"(https?:|mailto:|#)", t)]


def prose(text: str) -> str:
    """Return a document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def name_of(document: Path) -> str:
    """Return a document's path for test names."""
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_what_a_document_names_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(text))
    found = {span: complaint(span, document) for span in spans}
    assert {span: why for span, why in found.items() if why} == {}
    assert [t for t in links(text) if not (document.parent / t).exists()] == []


def fenced(text: str, *languages: str) -> list[str]:
    """Return the bodies of a document's fenced blocks of the given languages."""
    return [
        body
        for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if language in languages
    ]


def commands(text: str) -> list[list[str]]:
    """Return the hybridspec and make commands of blocks and code spans, as words."""
    lines = [line for block in fenced(text, "sh", "bash", "console") for line in block.splitlines()]
    lines += re.findall(r"^    (.*)$", prose(text), re.MULTILINE)
    lines += re.findall(r"(?<!`)`(hybridspec [^`\n]+)`(?!`)", prose(text))
    found = []
    for line in lines:
        line = re.sub(
            r"\$'(.*?)'", lambda m: shlex.quote(m[1].encode().decode("unicode_escape")), line
        )
        if line.removeprefix("$ ").startswith(("hybridspec ", "make ")):
            found.append(shlex.split(line.removeprefix("$ "), comments=True))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_in_a_document_parse(document: Path) -> None:
    for words in commands(document.read_text(encoding="utf-8")):
        if words[0] == "make":
            assert complaint(" ".join(words), document) is None
        elif not {"--help", "--version"} & set(words):
            assert parse(words[1:]).command


def test_commands_are_found() -> None:
    text = "    make test  # it\n`hybridspec info`\n```sh\nhybridspec generate $'a\\nb'\n```\n"
    assert commands(text) == [
        ["hybridspec", "generate", "a\nb"],
        ["make", "test"],
        ["hybridspec", "info"],
    ]


def test_python_in_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = fenced((ROOT / "README.md").read_text(encoding="utf-8"), "python")
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_python_for_other_engines_runs(guide: Path) -> None:
    blocks = fenced(guide.read_text(encoding="utf-8"), "python")
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, guide.name, "exec"), names)


def test_every_engine_has_a_guide() -> None:
    assert [guide.stem for guide in GUIDES[1:]] == ["flashinfer", "lightllm", "sglang", "vllm"]


def test_the_tutorial_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    [words] = [words for words in commands(text) if "--trace" in words]
    assert main(words[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = [line for block in fenced(text, "text") for line in block.splitlines()]
    assert len(shown) > 10
    assert [line for line in shown if line not in printed] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_lines_fit_a_page(document: Path) -> None:
    lines = document.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_every_picture_is_shown() -> None:
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    pictures = [path.name for path in (ROOT / "docs/images").iterdir()]
    assert [name for name in pictures if f"images/{name}" not in text] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize(
    "span",
    [
        "make no-such-target",
        "src/hybridspec/no_such_file.py",
        "no_such_folder/",
        "--no-such-flag",
        "hybridspec generate --no-such-flag",
        "no_such_function",
        "hybridspec.NoSuchClass",
        "no_such_call(x)",
        "NoSuchClass",
    ],
)
def test_a_missing_thing_is_seen(span: str) -> None:
    assert complaint(span, ROOT / "README.md") is not None


@pytest.mark.parametrize(
    "span",
    ["make test", "pyproject.toml", "src/hybridspec/", "--no-speculation", "SamplingParams", "k"],
)
def test_an_existing_thing_passes(span: str) -> None:
    assert complaint(span, ROOT / "README.md") is None
