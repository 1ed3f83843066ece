"""Run tests in a process of their own in which Triton's kernels are interpreted on the CPU.

Triton decides when it is imported whether kernels are compiled or interpreted, so the two kinds of
test cannot share a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run_interpreted", "run_with_compiler"]

ROOT = Path(__file__).resolve().parents[2]


def _run(command: list[str], interpret: str) -> str:
    environment = {
        **os.environ,
        # A script started alone has no pytest to find helpers, and tests its own tree's sources.
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"))),
        "TRITON_INTERPRET": interpret,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def run_interpreted(file: Path) -> None:
    """Run a file of tests with interpreted kernels and fail with its output if a test fails."""
    _run(["-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)], "1")


def run_with_compiler(script: Path, *arguments: str) -> str:
    """Run a script with compiled kernels and return what it printed."""
    return _run([str(script), *arguments], "0")
