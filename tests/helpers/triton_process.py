"""Run a script that compiles Triton's kernels, whatever this process does with them."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from helpers.interpreter import is_interpreting

__all__ = ["CAPABILITIES", "EXTENTS", "run_with_compiler"]

ROOT = Path(__file__).resolve().parents[2]
# Compiling is slow: one target always, the others by `make test-full`.
CAPABILITIES = ["90", *(pytest.param(c, marks=pytest.mark.slow) for c in ("80", "100"))]
# Where there are many variants: always a few of each kernel, by `make test-full` all.
EXTENTS = [
    pytest.param(("90", "--few"), id="few"),
    *(pytest.param((c,), marks=pytest.mark.slow, id=c) for c in ("80", "90", "100")),
]


def run_with_compiler(script: Path, *arguments: str) -> str:
    """Run a script with compiled kernels and return what it printed."""
    if not is_interpreting():  # then this process has all that the script imports
        printed = io.StringIO()
        with (
            mock.patch.object(sys, "argv", [str(script), *arguments]),
            contextlib.redirect_stdout(printed),
        ):
            runpy.run_path(str(script), run_name="__main__")
        return printed.getvalue()
    environment = {
        **os.environ,
        # A script started alone has no pytest to find helpers, and tests its own tree's sources.
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"))),
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout
