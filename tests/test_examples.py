"""The notebooks under examples/ run from top to bottom and print what they show."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    document = json.loads(notebook.read_text(encoding="utf-8"))
    assert document["nbformat"] == 4
    return [cell for cell in document["cells"] if cell["cell_type"] == "code"]


def run_cells(cells: list[dict[str, Any]], name: str) -> list[str]:
    """Run cells in one namespace; return what each of them prints."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source, f"{name}, code cell {number}", "exec"), namespace)
        printed.append(out.getvalue())
    return printed


def shown(cell: dict[str, Any]) -> str:
    """Return the printed text that a cell is stored with, pictures aside."""
    printed = [one for one in cell["outputs"] if "image/png" not in one.get("data", {})]
    assert all(output["name"] == "stdout" for output in printed)
    return "".join(line for output in printed for line in output["text"])


def answers(text: str) -> list[str]:
    """Return the lines that say whether tokens are equal; how fast they came may differ."""
    return [line for line in text.splitlines() if "same tokens" in line]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled texts may differ between processors where two tokens are all but equally likely."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = code_cells(notebook)
    printed = run_cells(cells, notebook.name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell, text in zip(cells, printed, strict=True):
        assert bool(text) == bool(shown(cell))
        assert answers(text) == answers(shown(cell))
    said = [line for text in printed for line in answers(text)]
    assert len(said) == 2
    assert all(line.endswith("True") for line in said)


def test_there_are_notebooks() -> None:
    assert [notebook.name for notebook in NOTEBOOKS] == ["quickstart.ipynb"]


def test_a_failing_cell_is_seen() -> None:
    cells = [{"source": ["x = 1\n", "print(x)"]}, {"source": ["print(y)"]}]
    assert run_cells(cells[:1], "a.ipynb") == ["1\n"]
    with pytest.raises(NameError, match="y"):
        run_cells(cells, "a.ipynb")
