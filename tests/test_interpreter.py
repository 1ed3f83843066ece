"""The process that interprets kernels passes on what happens there."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from helpers.interpreter import Interpreter

TESTS = textwrap.dedent("""
    import os

    import pytest

    @pytest.fixture
    def broken():
        raise RuntimeError("no set-up")

    @pytest.mark.parametrize("name", ["[a::b] c"])
    def test_passes(name):
        print("noise")
        assert os.environ["TRITON_INTERPRET"] == "1"

    def test_fails():
        print("a line before")
        assert 1 + 1 == 3

    def test_set_up(broken):
        pass

    def test_ends():
        os._exit(0)
""")


@pytest.fixture
def interpreter() -> Iterator[Interpreter]:
    interpreter = Interpreter()
    yield interpreter
    interpreter.stop()


def test_outcomes(interpreter: Interpreter, tmp_path: Path) -> None:
    file = tmp_path / "test_there.py"
    file.write_text(TESTS)

    def run(name: str) -> None:
        interpreter.run(SimpleNamespace(nodeid=f"{file}::{name}"))  # type: ignore[arg-type]

    run("test_passes[[a::b] c]")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)assert \(1 \+ 1\) == 3.*a line before"):
        run("test_fails")
    with pytest.raises(pytest.fail.Exception, match="no set-up"):
        run("test_set_up")
    with pytest.raises(pytest.fail.Exception, match="has ended"):
        run("test_ends")
    run("test_passes[[a::b] c]")  # in the next process
    process = interpreter.process
    with (
        mock.patch.object(process.stdout, "readline", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        run("test_passes[[a::b] c]")
    assert process.poll() is not None and interpreter.process is None
