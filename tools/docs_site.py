"""mkdocs hooks: the operators' READMEs become pages; links that leave the pages become text.

The site is made of the same files that people read in the repository, so links there may lead to
any file of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

__all__ = ["on_files", "on_page_markdown"]

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OPERATORS = ROOT / "src/hybridspec/ops"
_LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for the README of each operator, under operators/."""
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


def page_of(path: Path) -> Path | None:
    """Return where a file of the repository lies among the site's files, None if it is none."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    if path.name == "README.md" and path.parent.parent == OPERATORS:
        return Path("operators") / f"{path.parent.name}.md"
    return None
