"""Imports point one way, and optional packages stay where they belong."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

import hybridspec

SOURCE = Path(__file__).resolve().parent.parent / "src" / "hybridspec"
MODULES = sorted(SOURCE.rglob("*.py"))

# Each package uses only those of a lower number, itself aside. The root __init__ offers public
# names lazily and __main__ starts the command line, so both may name any package.
RANKS = {
    "errors": 0,
    "bundled": 0,
    "values": 0,
    "config": 1,
    "ops": 2,
    "runtime": 3,
    "models": 4,
    "speculate": 5,
    "engine": 6,
    "serve": 7,
    "cli": 8,
}
ONLY = {"compat": {"errors", "ops"}, "ops": {"errors", "ops"}}
THIRD_PARTY = {
    "torch": set(RANKS) - {"errors", "config", "bundled", "values"} | {"compat"},
    "triton": {"ops"},
    "numpy": set(),
    "transformers": set(),
    "huggingface_hub": {"models"},
    "safetensors": {"models"},
    "tokenizers": {"models"},
    "rich": {"cli"},
    "jinja2": {"models"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "pydantic": {"serve"},
    "prometheus_client": {"serve"},
    "aiohttp": {"serve"},
    "ray": {"serve"},
    "yarl": {"serve"},
}


def imported_modules(tree: ast.AST, module: str, *, is_package: bool) -> set[str]:
    """Return the absolute names of everything that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if is_package else module.rpartition(".")[0]
                base = importlib.util.resolve_name("." * node.level + base, package)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def package_of(name: str) -> str:
    """Return the part of a dotted name that the rules speak of: hybridspec.ops.x -> ops.

    A public name of the root counts as the package that it comes from.
    """
    parts = name.split(".")
    if len(parts) == 2 and (home := hybridspec._HOMES.get(parts[1])):
        parts = home.split(".")
    return parts[1] if len(parts) > 1 else ""


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return one line for each import that the rules forbid."""
    home = package_of(module)
    if home in ("", "__main__"):
        return []
    found = []
    for name in sorted(imported_modules(ast.parse(source), module, is_package=is_package)):
        top = name.split(".")[0]
        if top == "hybridspec":
            other = package_of(name)
            if other in ("", "__version__", home):
                continue
            is_allowed = (
                other in ONLY[home] if home in ONLY else RANKS.get(other, 99) < RANKS.get(home, -1)
            )
            if not is_allowed:
                found.append(f"{module} imports {name}")
        elif home not in THIRD_PARTY.get(top, {home}):
            found.append(f"{module} imports {name}")
    return found


def module_name(file: Path) -> str:
    """Return the dotted name of a file under src."""
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("file", MODULES, ids=module_name)
def test_imports_point_one_way(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    is_package = file.name == "__init__.py"
    assert violations(source, module_name(file), is_package=is_package) == []


def test_every_package_has_a_rank() -> None:
    known = {*RANKS, "compat", "__init__", "__main__"}
    present = {file.relative_to(SOURCE).parts[0].removesuffix(".py") for file in MODULES}
    assert present <= known


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hybridspec.ops.norms", "from hybridspec.runtime import step"),
        ("hybridspec.ops.norms.api", "import hybridspec.config"),
        ("hybridspec.runtime.pools", "def f():\n    from hybridspec.engine import LLM"),
        ("hybridspec.models.mtp", "from ..speculate import draft"),
        ("hybridspec.engine.llm", "import hybridspec.serve.app"),
        ("hybridspec.serve.app", "from hybridspec import cli"),
        ("hybridspec.compat.flashinfer", "from hybridspec.runtime.pools import Pools"),
        ("hybridspec.config", "import torch"),
        ("hybridspec.models.mtp", "from hybridspec import LLM"),
        ("hybridspec.engine.llm", "from transformers import AutoTokenizer"),
        ("hybridspec.models.weights", "import numpy.random"),
        ("hybridspec.engine.llm", "from hybridspec.unknown import x"),
    ],
)
def test_a_forbidden_import_is_seen(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1
