"""Run a script of benchmarks/, tools/ or scripts/ as a user would."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch

from hybridspec.engine import resolve

__all__ = ["run_apart", "run_here"]

ROOT = Path(__file__).resolve().parents[2]


def run_here(script: str, *words: object) -> None:
    """Run a Python file as `__main__` in this process, which spares it the imports.

    What scripts set for a whole process, in torch and here, is put back.
    """
    path = ROOT / script
    num_threads = torch.get_num_threads()
    with (
        mock.patch.object(sys, "argv", [str(path), *map(str, words)]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
        mock.patch.object(resolve, "PAGE_SIZE", resolve.PAGE_SIZE),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as exit:
            assert not exit.code, exit.code
        finally:
            torch.set_num_threads(num_threads)
            torch.set_default_device(None)


def run_apart(script: str, *words: object) -> str:
    """Run a file in a process of its own with this interpreter; return its standard output."""
    is_python = script.endswith(".py")
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))
        ),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable if is_python else "bash", script, *map(str, words)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
