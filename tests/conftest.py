"""Options and hooks of the whole test run."""

from __future__ import annotations

import datetime
import gc
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.interpreter import Interpreter, is_interpreting

ROOT = Path(__file__).resolve().parent.parent

INTERPRETER = Interpreter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --result-file, which keeps the outcome of a run as a text file."""
    parser.addoption("--result-file", metavar="FILE", help="write the outcome of the run to FILE")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the server's tests out of GPU runs: none needs a GPU, all need the server's extra."""
    is_gpu_run = config.getoption("markexpr") == "gpu"
    return True if is_gpu_run and collection_path == ROOT / "tests" / "serve" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail GPU tests where there is no GPU: whoever selects them means to run them."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.fail("needs a CUDA device, torch finds none", pytrace=False)


def pytest_collection_finish() -> None:
    """Spare the garbage collector thousands of tests that stay till the end."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Hand tests of interpreted kernels to the process for them."""
    if is_interpreting() or pyfuncitem.get_closest_marker("interpreted") is None:
        return None
    INTERPRETER.run(pyfuncitem)
    return True


def pytest_sessionfinish() -> None:
    """End that process, and let the collector see everything again."""
    INTERPRETER.stop()
    gc.unfreeze()


@pytest.fixture
def large_memory() -> Iterator[None]:
    """Let one worker at a time take many GiB of the device, and give them back."""
    import fcntl

    import torch

    with open(Path(tempfile.gettempdir()) / "hybridspec-large-memory.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Write the outcome, what it ran on and the slowest tests to the result file."""
    path = config.getoption("--result-file")
    if path is None or hasattr(config, "workerinput"):
        return
    import torch

    stats = terminalreporter.stats
    counts = {name: len(stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    lines = [
        f"date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"commit: {commit}",
        f"python {platform.python_version()}, torch {torch.__version__}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        f"selection: {config.getoption('-m') or 'all tests'}",
        ", ".join(f"{count} {name}" for name, count in counts.items())
        + f"; exit status {int(exitstatus)}",
    ]
    lines += [
        f"{name}: {report.nodeid}" for name in ("failed", "error") for report in stats.get(name, ())
    ]
    calls = sorted(
        (report for report in stats.get("passed", ()) if report.when == "call"),
        key=lambda report: -report.duration,
    )
    lines += ["", "slowest:"]
    lines += [f"{report.duration:8.1f} s  {report.nodeid}" for report in calls[:15]]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
