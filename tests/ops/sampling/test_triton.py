"""The kernels that choose tokens, compiled without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.triton_process import run_with_compiler

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(c, marks=pytest.mark.slow) for c in (80, 100))]
)
def test_compiled_kernels_do_not_spill(capability: int) -> None:
    reports = json.loads(run_with_compiler(HERE / "compile_kernels.py", str(capability)))
    assert len(reports) == 18
    assert [report for report in reports if report["stack_bytes"] > 0] == []
    assert max(report["registers"] for report in reports) <= 128
