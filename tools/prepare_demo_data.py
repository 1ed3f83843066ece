"""Gathers the demo model's text: CPython's standard library, its tests and its documentation.

Writes `code.bin`, `docs.bin` and `tests.bin` (training bytes, byte 0 between files), held-out files
as JSON lines, and the held-out prompts. The library is that of the running interpreter (use CPython
3.11 with its tests installed); the documentation is the unpacked Debian package `python3.11-doc`:

    apt-get download python3.11-doc && dpkg -x python3.11-doc_*.deb python-doc
    python tools/prepare_demo_data.py --docs python-doc --out demo-data --prompts prompts
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Whole files the model never sees.
HELD_OUT_CODE = {
    "asyncio/format_helpers.py",
    "concurrent/futures/__init__.py",
    "csv.py",
    "email/charset.py",
    "gzip.py",
    "json/tool.py",
    "multiprocessing/popen_fork.py",
    "ntpath.py",
    "pty.py",
    "tkinter/messagebox.py",
    "turtledemo/clock.py",
    "uu.py",
    "wsgiref/handlers.py",
    "xml/dom/domreg.py",
    "xmlrpc/client.py",
}
HELD_OUT_DOCS = {
    "c-api/objimpl.rst",
    "library/imaplib.rst",
    "library/re.rst",
    "library/turtle.rst",
    "library/weakref.rst",
    "using/mac.rst",
}
# Tests of held-out modules quote them, so they are left out altogether.
_SKIPPED_TESTS = {
    "test_csv.py",
    "test_gzip.py",
    "test_ntpath.py",
    "test_pty.py",
    "test_tool.py",
    "test_uu.py",
    "test_wsgiref.py",
    "test_xmlrpc.py",
}
_SKIPPED_FOLDERS = {"site-packages", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}
PROMPT_BYTES = 512
_SPACING = 1024
_OVERLAP_BYTES = 64


def library_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields (name, path) of every Python file of the standard library that is of use."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        is_table = name.startswith("encodings/") and b"charmap_build" in path.read_bytes()
        if not _SKIPPED_FOLDERS.intersection(name.split("/")) and not is_table:
            yield name, path


def is_test(name: str) -> bool:
    """Tells whether a library file belongs to a test suite."""
    return bool({"test", "tests"}.intersection(name.split("/")))


def collect(library: Path, docs: Path) -> dict[str, dict[str, bytes]]:
    """Groups the text: training `code`, `docs`, `tests`; `heldout_code`, `heldout_docs`."""
    groups = {name: {} for name in ("code", "docs", "tests", "heldout_code", "heldout_docs")}
    for name, path in library_files(library):
        if name in HELD_OUT_CODE:
            groups["heldout_code"][name] = path.read_bytes()
        elif not is_test(name):
            groups["code"][name] = path.read_bytes()
        elif path.name not in _SKIPPED_TESTS:
            groups["tests"][name] = path.read_bytes()
    for path in sorted(docs.rglob("_sources/**/*.rst.txt")):
        name = path.as_posix().split("_sources/")[1].removesuffix(".txt")
        groups["heldout_docs" if name in HELD_OUT_DOCS else "docs"][name] = path.read_bytes()
    for files in groups.values():
        for name in [name for name, text in files.items() if b"\0" in text or not text]:
            del files[name]
    if len(groups["heldout_code"]) != len(HELD_OUT_CODE):
        raise ValueError("the library lacks held-out files")
    if len(groups["heldout_docs"]) != len(HELD_OUT_DOCS):
        raise ValueError("the documentation lacks held-out files")
    return groups


def choose_prompts(files: dict[str, bytes], count: int, prefix: str, seed: int) -> list[dict]:
    """Draws `count` prompts at line starts that do not overlap and that text follows."""
    places = []
    for name, text in files.items():
        for start in range(0, len(text) - _SPACING, _SPACING):
            line = text.find(b"\n", start) + 1 if start else 0
            prompt = text[line : line + PROMPT_BYTES]
            if prompt.isascii() and line + PROMPT_BYTES + 256 <= len(text):
                places.append({"source": f"{prefix}/{name}@{line}", "text": prompt.decode()})
    chosen = sorted(random.Random(seed).sample(range(len(places)), count))
    return [places[i] for i in chosen]


def overlap(held_out: dict[str, bytes], training: list[bytes]) -> float:
    """Share of the 64-byte strings of held-out files that occur in the training text too."""
    pieces = {
        text[i : i + _OVERLAP_BYTES]
        for text in held_out.values()
        for i in range(len(text) - _OVERLAP_BYTES + 1)
    }
    found = set()
    for text in training:
        for i in range(len(text) - _OVERLAP_BYTES + 1):
            if text[i : i + _OVERLAP_BYTES] in pieces:
                found.add(text[i : i + _OVERLAP_BYTES])
    return len(found) / len(pieces)


def write_lines(path: Path, rows: list[dict]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Writes all files and prints their sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--docs", type=Path, required=True, help="unpacked python3.11-doc")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="folder for the prompts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    groups = collect(args.library, args.docs)
    args.out.mkdir(parents=True, exist_ok=True)
    args.prompts.mkdir(parents=True, exist_ok=True)
    for name, files in groups.items():
        if name.startswith("heldout"):
            rows = [{"source": n, "text": t.decode()} for n, t in files.items()]
            write_lines(args.out / f"{name}.jsonl", rows)
        else:
            (args.out / f"{name}.bin").write_bytes(b"\0" + b"\0".join(files.values()) + b"\0")
        print(f"{name}: {len(files)} files, {sum(map(len, files.values())):,} bytes")
    training = [text for kind in ("code", "docs", "tests") for text in groups[kind].values()]
    for kind, prefix, count in (("code", "Lib", 64), ("docs", "Doc", 32)):
        prompts = choose_prompts(groups[f"heldout_{kind}"], count, prefix, args.seed)
        write_lines(args.prompts / f"{kind}.jsonl", prompts)
        share = overlap(groups[f"heldout_{kind}"], training)
        print(f"held-out {kind}: {share:.1%} of its 64-byte strings occur in the training text")


if __name__ == "__main__":
    main()
