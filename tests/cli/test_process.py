"""What only a real process shows: signals, a reader that goes away, exit status, module start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hybridspec

TESTS = Path(__file__).resolve().parent.parent

# A process in which the engine is scripted: an endless script, a line of 50 tokens per step.
ENDLESS = f"""
    import itertools, sys, time
    sys.path.insert(0, {str(TESTS)!r})
    from helpers.fake_engine import FakeLLM, ScriptedStep
    from hybridspec.cli import loading, main

    class Endless(list):
        def __iter__(self):
            for _ in range(100_000):
                time.sleep(0.001)
                yield ScriptedStep(drafted="x" * 49, accepted=49, then="\\n")

    loading.open_engine = lambda arguments: FakeLLM(script=Endless([None]))
    loading.warm_up = lambda llm: None
    sys.exit(main(sys.argv[1:]))
"""


def start(*words: str) -> subprocess.Popen[str]:
    """Start `hybridspec generate` over the endless script."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ENDLESS), "generate", "hi", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("words", [(), ("--json",)], ids=str)
def test_interrupt_is_quiet(words: tuple[str, ...]) -> None:
    process = start(*words)
    assert process.stdout is not None
    if "--json" in words:
        process.stdout.close()  # nothing is printed before the end
        process.stdout = None
        wait_until_running(process.pid)
    else:
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")


def wait_until_running(pid: int) -> None:
    """Wait until a process has loaded torch and then some, by the processor time it used."""
    import time

    ticks = 0
    while ticks < 2 * os.sysconf("SC_CLK_TCK"):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        time.sleep(0.05)


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = start("--quiet")
    assert process.stdout is not None
    assert process.stdout.readline() == "a" + "x" * 49 + "\n"
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (141, "")


def test_text_arrives_while_it_is_generated() -> None:
    process = start("--quiet")
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline()
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=30)


@pytest.mark.parametrize(
    "command",
    [
        [str(Path(sys.executable).with_name("hybridspec"))],
        [sys.executable, "-m", "hybridspec"],
    ],
    ids=["script", "module"],
)
def test_both_ways_to_start(command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"hybridspec {hybridspec.__version__}\n"
    done = subprocess.run([*command, "nonsense"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_missing_extra_is_named() -> None:
    code = (
        "import sys\n"
        "sys.modules['rich'] = None\n"
        "from hybridspec.cli import main\n"
        "sys.exit(main(['info']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "hybridspec: error: rich is not installed: pip install 'hybridspec[engine]'\n"
    )
