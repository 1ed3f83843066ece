"""The tools that make the demo model, one after another, on a little text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpu_figures
from helpers.scripts import run_apart, run_here
from prepare_demo_data import HELD_OUT_CODE, HELD_OUT_DOCS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library and documents of the shape that is expected, and the data made from them."""
    folder = tmp_path_factory.mktemp("demo")
    library, docs = folder / "lib", folder / "docs" / "html" / "_sources"
    for name in (*HELD_OUT_CODE, "heapq.py", "test/test_heapq.py", "site-packages/other.py"):
        write(library / name, f"# {name}\ndef f(x):\n    return x + {len(name)}\n", 160)
    for name in (*HELD_OUT_DOCS, "library/heapq.rst"):
        write(docs / f"{name}.txt", f"{name}\n=======\n\nA heap of {len(name)} words.\n", 220)
    arguments = ["--library", library, "--docs", folder / "docs", "--out", folder / "data"]
    run_here("tools/prepare_demo_data.py", *arguments, "--prompts", folder / "prompts")
    return folder


def write(path: Path, text: str, times: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text * times)


def shorten(source: Path, target: Path, count: int, length: int) -> None:
    """Keep the first texts of a file of JSON lines, and of these the first bytes."""
    rows = [json.loads(line) for line in source.read_text().splitlines()[:count]]
    lines = [json.dumps(row | {"text": row["text"][:length]}) for row in rows]
    write(target, "\n".join(lines) + "\n", 1)


def test_prepared_data(folder: Path) -> None:
    prompts = [(folder / "prompts" / f"{kind}.jsonl").read_text() for kind in ("code", "docs")]
    assert [text.count("\n") for text in prompts] == [64, 32]
    held_out = (folder / "data" / "heldout_code.jsonl").read_text().splitlines()
    assert {json.loads(line)["source"] for line in held_out} == HELD_OUT_CODE
    code = (folder / "data" / "code.bin").read_bytes()
    assert b"# heapq.py" in code and b"csv.py" not in code and b"other.py" not in code
    assert b"# test/test_heapq.py" in (folder / "data" / "tests.bin").read_bytes()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", DEVICES)
def test_a_model_is_trained_and_evaluated(folder: Path, tmp_path: Path, device: str) -> None:
    """Five steps: on a GPU the last two of them come from a captured graph."""
    run = run_here if device == "cpu" else run_apart
    run(
        "tools/train_demo_model.py", "--data-dir", folder / "data", "--out", tmp_path, "--steps", 5,
        "--batch", 2, "--context", 64, "--draft-steps", 2, "--no-compile", "--device", device,
    )  # fmt: skip
    figures = json.loads((tmp_path / "training.json").read_text())
    assert figures["tokens"] == 5 * 2 * 64 and figures["log"][-1]["step"] == 4
    for part, count, length in (("prompts", 2, 24), ("data", 1, 400)):
        for path in (folder / part).glob("*.jsonl"):
            shorten(path, tmp_path / part / path.name, count, length)
    run(
        "tools/evaluate_demo_model.py", "--model", tmp_path / "model", "--prompts",
        tmp_path / "prompts", "--data", tmp_path / "data", "--out", tmp_path / "evaluation.json",
        "--new-tokens", 24, "--device", device,
    )  # fmt: skip
    found = json.loads((tmp_path / "evaluation.json").read_text())
    for kind in ("code", "docs"):
        assert 0 < found[kind]["bits_per_byte"] < 9
        assert found[kind]["greedy"]["all"]["continuations"] == 2


def test_bits_per_byte_of_states_in_8_bits(folder: Path, tmp_path: Path) -> None:
    """A benchmark of held-out text, which the tools prepare."""
    for kind in ("code", "docs"):
        name = f"heldout_{kind}.jsonl"
        shorten(folder / "data" / name, tmp_path / name, 1, 100)
    file = tmp_path / "result.json"
    run_here("benchmarks/gdn_8bit_model.py", "--data", tmp_path, "--json", file)
    rows = json.loads(file.read_text())["rows"]
    assert [(row["text"], row["bytes"]) for row in rows] == [("code", 100)] * 3 + [
        ("docs", 100)
    ] * 3


@pytest.mark.parametrize("name", gpu_figures.RUNS)
def test_figures_are_asked_for_with_flags_that_exist(name: str) -> None:
    _, script, *words = gpu_figures.command_of(name)
    text = Path(script).read_text()
    for flag in [word for word in [*words, "--json"] if word.startswith("--")]:
        assert f'"{flag}"' in text, f"{script} has no {flag}"


def test_a_figure_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {"one": "benchmarks/no_such_file.py", "two": "benchmarks/fold_rules.py --help"}
    monkeypatch.setattr(gpu_figures, "RUNS", runs)
    monkeypatch.setattr("sys.argv", ["gpu_figures.py", str(tmp_path)])
    assert gpu_figures.main() == 1
    said = capsys.readouterr().out
    assert "one: failed with 2" in said and "two: ok" in said
    assert said.splitlines()[-1] == "not succeeded: one"
    assert "usage: fold_rules.py" in (tmp_path / "two.log").read_text()
