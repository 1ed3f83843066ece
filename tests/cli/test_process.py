"""What only a real process shows: signals, a reader that goes away, exit status, module start."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hybridspec

TESTS = Path(__file__).resolve().parent.parent

# A process in which the engine is scripted: an endless script, a line of 50 tokens per step.
SCRIPT = textwrap.dedent(f"""
    import pathlib, sys, time
    sys.path.insert(0, {str(TESTS)!r})
    from helpers.fake_engine import FakeLLM, ScriptedStep
    from hybridspec.cli import loading, main

    class Endless(list):
        def __iter__(self):
            pathlib.Path(sys.argv.pop(1)).touch()
            for _ in range(10_000):
                time.sleep(0.001)
                yield ScriptedStep(drafted="x" * 49, accepted=49, then="\\n")

    loading.open_engine = lambda arguments: FakeLLM(script=Endless([None]))
    loading.warm_up = lambda llm: None
    sys.exit(main(sys.argv[2:]))
""")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `hybridspec generate` over the endless script; return once it generates."""
    running = tmp_path / "running"
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                SCRIPT,
                str(running),
                "generate",
                "hi",
                *words,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A runner in the background ignores interrupts, and its children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        while not running.exists() and process.poll() is None:
            time.sleep(0.02)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("words", [(), ("--json",)], ids=str)
def test_interrupt_is_quiet(
    start: Callable[..., subprocess.Popen[str]], words: tuple[str, ...]
) -> None:
    process = start(*words)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_a_reader_that_goes_away_is_no_error(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start("--quiet")
    assert process.stdout is not None
    assert process.stdout.readline() == "a" + "x" * 49 + "\n"
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (141, "")


def test_text_arrives_while_it_is_generated(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start("--quiet")
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline()
    assert process.poll() is None


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


@pytest.mark.parametrize("module", ["hybridspec.cli.parser", "torch"])
def test_an_interrupt_while_modules_load_is_quiet(module: str) -> None:
    code = f"""
        import importlib.abc, sys

        class Interrupt(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == {module!r}:
                    raise KeyboardInterrupt

        sys.meta_path.insert(0, Interrupt())
        from hybridspec.cli import main
        sys.exit(main(["generate", "x"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
