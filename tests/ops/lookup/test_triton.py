"""The kernel that looks up, compiled without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.triton_process import run_with_compiler


def test_compiled_kernel_does_not_spill() -> None:
    script = Path(__file__).resolve().parent / "compile_kernels.py"
    reports = json.loads(run_with_compiler(script, "80", "90", "100"))
    assert [report["capability"] for report in reports] == [80, 80, 90, 90, 100, 100]
    assert [report for report in reports if report["stack_bytes"] > 0] == []
    assert max(report["registers"] for report in reports) <= 128
