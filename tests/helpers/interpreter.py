"""Runs the tests marked `interpreted` in a process in which Triton's kernels are interpreted.

Triton decides when a kernel is defined whether it is compiled or interpreted, so these tests cannot
share a process with the others. One more process serves all of them that a test run has: it is
itself a pytest session, which takes the names of tests from a pipe and says what came of each.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

__all__ = ["Interpreter", "is_interpreting"]

ROOT = Path(__file__).resolve().parents[2]


def is_interpreting() -> bool:
    """Whether kernels are interpreted in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Interpreter:
    """The other process, started when the first test needs it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def run(self, item: pytest.Item) -> None:
        """Run one test there; fail with its output if it fails, or if the process ends."""
        if self.process is None:
            self.process = _start()
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(f"{item.nodeid}\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BaseException:  # of which a time-out is one: what it is busy with is not awaited
            self.stop()
            raise
        if not answer:
            self.stop()
            pytest.fail("the process that interprets kernels has ended", pytrace=False)
        if failure := json.loads(answer):
            pytest.fail(failure, pytrace=False)

    def stop(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def _start() -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"))),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = ["--disable-plugin-autoload", "-p", "no:cacheprovider", "-p", __name__]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *options],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# What follows makes this file the plugin that a session in the other process is given.

_PIPES: list[int] = []
_REPORTS: list[pytest.TestReport] = []


def pytest_addoption() -> None:
    """Take the pipes away before pytest captures what tests print, and prints itself."""
    _PIPES.extend((os.dup(0), os.dup(1)))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> bool:
    """Collect nothing in advance."""
    session.items = []
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run every test whose name comes in and answer with what failed, "" for nothing."""
    with open(_PIPES[0]) as names, open(_PIPES[1], "w") as answers:
        for name in names:
            [item] = session.perform_collect([name.strip()])
            interpreter = sys.modules.get("triton.runtime.interpreter")
            if interpreter is not None and interpreter.inspect is inspect:
                _remember_builtins(interpreter)
            _REPORTS.clear()
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            failures = [
                "\n".join((report.longreprtext, *(text for _, text in report.sections)))
                for report in _REPORTS
                if report.failed
            ]
            print(json.dumps("\n".join(failures)), file=answers, flush=True)
    return True


def _remember_builtins(interpreter: ModuleType) -> None:
    """Spare Triton the search for its own functions, which is half the time of small kernels.

    It lists all members of its modules at every call of a function inside a kernel.
    """
    names: dict[object, list[str]] = {}

    def getmembers(holder: object) -> list[tuple[str, object]]:
        if holder not in names:
            found = inspect.getmembers(holder)
            names[holder] = [name for name, member in found if is_builtin(member)]
        return [(name, getattr(holder, name)) for name in names[holder]]

    is_builtin = interpreter.tl.core.is_builtin
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what came of set-up, call and teardown."""
    _REPORTS.append(report)
