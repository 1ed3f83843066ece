"""The kernels without a GPU: compiled for three targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.triton_process import EXTENTS, run_with_compiler

HERE = Path(__file__).resolve().parent
# Of one program; 4 fit a multiprocessor of the smallest target.
MOST_SHARED_BYTES = 40_000
MOST_SPILLED_BYTES = 160  # of a thread, where products are of fp32


@pytest.mark.parametrize("words", EXTENTS)
def test_compiled_kernels_do_not_spill(words: tuple[str, ...]) -> None:
    reports = json.loads(run_with_compiler(HERE / "compile_kernels.py", *words))
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


@pytest.mark.parametrize("words", EXTENTS)
def test_the_kernel_of_the_raw_ring_does_not_spill(words: tuple[str, ...]) -> None:
    reports = json.loads(run_with_compiler(HERE / "compile_raw.py", *words))
    # Products of fp32 are made without tensor cores, from more registers than there are.
    exact = [report for report in reports if report["constants"]["OPERAND"] == "fp32"]
    assert (len(exact), len(reports)) == ((1, 3) if "--few" in words else (2, 10))
    assert [report for report in reports if report["stack_bytes"] > 0 and report not in exact] == []
    assert max(report["stack_bytes"] for report in exact) <= MOST_SPILLED_BYTES
    assert max(report["shared_bytes"] for report in reports) <= MOST_SHARED_BYTES
