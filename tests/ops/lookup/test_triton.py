"""The kernel that looks up, compiled without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.triton_process import CAPABILITIES, run_with_compiler


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_kernel_does_not_spill(capability: str) -> None:
    script = Path(__file__).resolve().parent / "compile_kernels.py"
    reports = json.loads(run_with_compiler(script, capability))
    assert [report["capability"] for report in reports] == [int(capability)] * 2
    assert [report for report in reports if report["stack_bytes"] > 0] == []
    assert max(report["registers"] for report in reports) <= 128
