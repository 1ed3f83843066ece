"""mkdocs hooks: operators' READMEs and docstrings become pages; links that leave them become text.

The site is made of the same files that people read in the repository, so links there may lead to
any file of it.
"""

from __future__ import annotations

import ast
import os
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

__all__ = ["on_files", "on_page_markdown"]

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src/hybridspec"
OPERATORS = PACKAGE / "ops"
INTERFACE = {
    "engine/llm.py": ("LLM",),
    "config.py": ("SamplingParams",),
    "engine/outputs.py": ("RequestOutput", "CompletionOutput", "RequestStats", "StepOutput"),
    "errors.py": ("CheckpointError", "UnsupportedError", "CapacityError"),
}
_LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page of the Python interface, and one for the README of each operator."""
    files.append(File.generated(config, "interface.md", content=interface_page()))
    for readme in sorted(OPERATORS.glob("*/README.md")):
        content = readme.read_text(encoding="utf-8")
        files.append(File.generated(config, page_of(readme).as_posix(), content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point links at pages, and leave only the words of those that lead elsewhere."""
    place = Path(page.file.src_uri)
    source = DOCS / place
    if place.parts[0] == "operators":
        source = OPERATORS / place.stem / "README.md"

    def replaced(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        if re.match(r"(https?:|mailto:|#)", target):
            return match[0]
        path, _, anchor = target.partition("#")
        found = page_of((source.parent / path).resolve())
        if found is None:
            return words
        to = os.path.relpath(found, place.parent)
        return f"{image}[{words}]({to}{'#' + anchor if anchor else ''})"

    return _LINK.sub(replaced, markdown)


def interface_page() -> str:
    """Return the docstrings of the public classes and of their methods as a page."""
    parts = ["# Python interface\n\nFrom the docstrings of what `hybridspec` exports."]
    for file, names in INTERFACE.items():
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for name in names:
            parts.append(f"## {name}\n\n{_as_text(ast.get_docstring(classes[name]))}")
            for node in classes[name].body:
                said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
                if said and not node.name.startswith("_"):
                    text = _as_text(f"{_signature(node)}\n\n{said}")
                    parts.append(f"### {node.name}\n\n{text}")
    return "\n\n".join(parts) + "\n"


def _signature(node: ast.FunctionDef) -> str:
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    if any(isinstance(name, ast.Name) and name.id == "property" for name in node.decorator_list):
        return f"{node.name}{returns}"
    words = f"{node.name}({ast.unparse(node.args)}){returns}"
    return textwrap.fill(words, 100, subsequent_indent="    ", break_long_words=False)


def _as_text(said: str | None) -> str:
    return f"```text\n{said}\n```"


def page_of(path: Path) -> Path | None:
    """Return where a file of the repository lies among the site's files, None if it is none."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    if path.name == "README.md" and path.parent.parent == OPERATORS:
        return Path("operators") / f"{path.parent.name}.md"
    return None
