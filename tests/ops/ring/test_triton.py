"""The kernels without a GPU: interpreted against the reference."""

from __future__ import annotations

from pathlib import Path

from helpers.triton_process import run_interpreted


def test_interpreted_kernels_equal_the_reference() -> None:
    run_interpreted(Path(__file__).resolve().parent / "interpreted.py")
