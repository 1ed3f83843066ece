"""Pytest plugin: `-p gpu_results --gpu-results FILE` writes ids and outcomes of a run as JSON."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --gpu-results."""
    parser.addoption("--gpu-results", metavar="FILE", help="write ids and outcomes to FILE")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write GPU, versions, commit, whether the tree was dirty, and every outcome."""
    config = terminalreporter.config
    path = config.getoption("--gpu-results")
    if path is None or hasattr(config, "workerinput"):
        return
    import torch
    import triton

    outcomes = {
        report.nodeid: name
        for name in ("passed", "skipped", "failed", "error")
        for report in terminalreporter.stats.get(name, ())
    }
    result = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "counts": {name: list(outcomes.values()).count(name) for name in set(outcomes.values())},
        "tests": dict(sorted(outcomes.items())),
    }
    Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
