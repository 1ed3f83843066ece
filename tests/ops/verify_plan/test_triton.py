"""The kernels without a GPU: compiled for three targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.triton_process import EXTENTS, run_with_compiler

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("words", EXTENTS)
def test_compiled_kernels_do_not_spill(words: tuple[str, ...]) -> None:
    reports = json.loads(run_with_compiler(HERE / "compile_kernels.py", *words))
    assert {report["capability"] for report in reports} == {int(words[0])}
    assert len({report["kernel"] for report in reports}) == 12
    assert [report for report in reports if report["spills"] > 0] == []
    assert max(report["registers"] for report in reports) <= 128
