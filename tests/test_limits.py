"""Sizes of files, functions and kernels stay within what CONTRIBUTING.md says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "tools", "benchmarks", "scripts", "examples")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cu", ".cuh")
)

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60  # without the docstring
MOST_KERNEL_LINES = 120

# What is larger, and waits to be divided.
LARGE_FILES = {
    "benchmarks/gdn_verify.py",
    "tests/compat/test_flashinfer.py",
    "tests/helpers/gdn_cases.py",
    "tests/ops/gated_delta_rule/test_int8.py",
}
LARGE_FUNCTIONS = {
    "benchmarks/cpu_generate.py: main",
    "benchmarks/gdn_drift.py: run",
    "benchmarks/gdn_verify.py: __init__",
    "src/hybridspec/compat/flashinfer.py: gated_delta_rule_mtp_ucache_flush",
    "src/hybridspec/engine/llm.py: __init__",
    "src/hybridspec/ops/gated_delta_rule/contracts.py: check_rows",
    "src/hybridspec/ops/gated_delta_rule/launch.py: verify",
    "src/hybridspec/ops/gated_delta_rule/reference.py: verify",
    "tests/helpers/attention_cases.py: make_attention_batch",
    "tests/helpers/gdn_sessions.py: step",
}


def python_functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, lines and the most lines of every function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            is_kernel = any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)
            yield node.name, lines, MOST_KERNEL_LINES if is_kernel else MOST_FUNCTION_LINES


def cuda_functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, lines and the most lines of every function of the device."""
    lines = source.splitlines()
    for first, line in enumerate(lines):
        start = re.match(r"( *)(KERNEL\(.*?\)|DEVICE) .*?(\w+)\(", line)
        if start is None or line.endswith("}"):
            continue
        ends = (i for i in range(first, len(lines)) if lines[i] == start[1] + "}")
        most = MOST_FUNCTION_LINES if start[2] == "DEVICE" else MOST_KERNEL_LINES
        yield start[3], next(ends) - first + 1, most


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> list[tuple[str, int, int]]:
    source = path.read_text(encoding="utf-8")
    return list((python_functions if path.suffix == ".py" else cuda_functions)(source))


def test_files() -> None:
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    too_long = {name: count for name, count in lines.items() if count > MOST_FILE_LINES}
    assert too_long.keys() - LARGE_FILES == set(), too_long


def test_functions() -> None:
    too_long = {
        f"{name_of(path)}: {function}": lines
        for path in SOURCES
        for function, lines, most in functions(path)
        if lines > most
    }
    assert too_long.keys() - LARGE_FUNCTIONS == set(), too_long


def test_functions_are_found() -> None:
    found = {name: functions(path) for path in SOURCES if (name := path.name)}
    assert ("verify", MOST_KERNEL_LINES) in {(name, most) for name, _, most in found["verify.cu"]}
    assert "stream" in {name for name, *_ in found["verify.cu"]}
    assert {"ask", "fold"} <= {name for name, *_ in found["verify_phases.cuh"]}
    assert "put" in {name for name, *_ in found["verify_states.cuh"]}
    long_one = "@triton.jit\ndef kernel():\n" + "    x = 1\n" * 120
    assert list(python_functions(long_one)) == [("kernel", 121, MOST_KERNEL_LINES)]
    assert list(python_functions('def f():\n    """One."""\n    return 1\n')) == [("f", 2, 60)]
    device = "DEVICE void f(int x) {\n" + "    g();\n" * 60 + "}\nDEVICE int h() { return 1; }\n"
    assert list(cuda_functions(device)) == [("f", 62, MOST_FUNCTION_LINES)]
