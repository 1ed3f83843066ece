"""The kernels that choose tokens, compiled without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.triton_process import EXTENTS, run_with_compiler

HERE = Path(__file__).resolve().parent
MOST_SPILLED_BYTES = 40  # of a thread; Triton 3.9 stops at 80 registers by itself


@pytest.mark.parametrize("words", EXTENTS)
def test_compiled_kernels_do_not_spill(words: tuple[str, ...]) -> None:
    reports = json.loads(run_with_compiler(HERE / "compile_kernels.py", *words))
    assert len(reports) == (9 if "--few" in words else 18)
    most = 0 if words[0] == "90" else MOST_SPILLED_BYTES
    assert [report for report in reports if report["stack_bytes"] > most] == []
    assert max(report["registers"] for report in reports) <= 128
