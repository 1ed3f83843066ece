"""Pytest plugin: `-p gpu_results --gpu-results=FILE` keeps ids and outcomes of a run as JSON.

The file is written while tests run, so that one stays that says how far the run came, however it
ends. Under xdist the process that hands out the tests writes it, and a worker whose device stopped
answering makes room for another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NUM_SLOWEST = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --gpu-results."""
    parser.addoption("--gpu-results", metavar="FILE", help="write ids and outcomes to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Start recording, or watching the device in a worker of xdist."""
    path = config.getoption("--gpu-results")
    if path is None:
        return
    if hasattr(config, "workerinput"):
        plugin: object = Watch()
    else:
        plugin = Recorder(Path(path), config)
    config.pluginmanager.register(plugin, "gpu-results-of-a-run")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _environment() -> dict[str, object]:
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": _git("status", "--porcelain", "--untracked-files=no") != "",
    }


class Recorder:
    """Outcomes of the tests that have ended, and the file that holds them."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self.path = path
        self.environment = _environment()
        keyword = config.option.keyword
        self.selection = " ".join([*config.args, *(["-k", keyword] if keyword else [])])
        self.collected: set[str] = set()
        self.outcomes: dict[str, str] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.finished: set[str] = set()
        self.started = time.monotonic()
        self._write()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what is to run, without xdist."""
        self.collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Note what is to run, with xdist."""
        self.collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of set-up, call and teardown."""
        name = report.nodeid
        self.seconds[name] += report.duration
        if report.failed:
            self.outcomes[name] = "failed" if report.when == "call" else "error"
        elif report.skipped or report.when == "call":
            self.outcomes.setdefault(name, report.outcome)
        if report.when in ("teardown", "???"):  # the latter of a test whose worker died
            self.finished.add(name)
            self._write()

    def pytest_sessionfinish(self) -> None:
        """Write the last state."""
        self._write()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print counts of every file and the slowest tests."""
        files: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for name, outcome in self.outcomes.items():
            files[name.split("::")[0]][outcome] += 1
        kinds = ("passed", "failed", "error", "skipped")
        write = terminalreporter.write_line
        terminalreporter.section("GPU tests" + (", not all of them" if self._is_partial() else ""))
        write("".join(f"{kind:>8}" for kind in kinds) + "  seconds  file")
        for file, counts in [*sorted(files.items()), ("all", self._counts())]:
            seconds = sum(
                s for name, s in self.seconds.items() if file in ("all", name.split("::")[0])
            )
            numbers = "".join(f"{counts[kind]:8}" for kind in kinds)
            write(f"{numbers}{seconds:9.1f}  {file}")
        write(f"of {len(self.collected)}, {time.monotonic() - self.started:.0f} s; {self.path}")
        for name in sorted(self.seconds, key=lambda name: -self.seconds[name])[:NUM_SLOWEST]:
            write(f"{self.seconds[name]:8.1f} s  {name}")

    def _counts(self) -> Counter[str]:
        return Counter(self.outcomes.values())

    def _is_partial(self) -> bool:
        return not self.collected or not self.collected <= self.finished

    def _write(self) -> None:
        result = self.environment | {
            "selection": self.selection,
            "is_partial": self._is_partial(),
            "num_collected": len(self.collected),
            "seconds": round(time.monotonic() - self.started, 1),
            "counts": dict(sorted(self._counts().items())),
            "tests": dict(sorted(self.outcomes.items())),
        }
        other = self.path.with_suffix(".tmp")
        other.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        other.replace(self.path)


class Watch:
    """Ends a worker after a test that broke its CUDA context: nothing could pass in it any more."""

    def __init__(self) -> None:
        self.has_failed = False

    def pytest_runtest_logstart(self) -> None:
        """Forget the test before."""
        self.has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember failures."""
        self.has_failed |= report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """Leave if the device no longer answers; xdist starts another worker."""
        if not self.has_failed:
            return
        import torch

        if torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(1)
