"""Run a script that compiles Triton's kernels, whatever this process does with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run_with_compiler"]

ROOT = Path(__file__).resolve().parents[2]


def run_with_compiler(script: Path, *arguments: str) -> str:
    """Run a script with compiled kernels and return what it printed."""
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
