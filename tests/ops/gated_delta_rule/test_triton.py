"""The kernels without a GPU: compiled for three targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.triton_process import run_with_compiler

HERE = Path(__file__).resolve().parent
# Of one program; 4 fit a multiprocessor of the smallest target.
MOST_SHARED_BYTES = 40_000


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(c, marks=pytest.mark.slow) for c in (80, 100))]
)
def test_compiled_kernels_do_not_spill(capability: int) -> None:
    reports = json.loads(run_with_compiler(HERE / "compile_kernels.py", str(capability)))
    assert {report["kernel"].rpartition(".")[2] for report in reports} >= {
        "verify_kernel",
        "advance_kernel",
        "commit_kernel",
        "decide_folds_kernel",
        "write_slots_kernel",
        "reset_slots_kernel",
    }
    spilling = [report for report in reports if report["stack_bytes"] > 0]
    assert spilling == []
    large = [report for report in reports if report["shared_bytes"] > MOST_SHARED_BYTES]
    assert [report for report in large if "fp32" not in "".join(report["types"][:1])] == []
    assert max(report["registers"] for report in reports) <= 255
