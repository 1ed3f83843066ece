"""The kernel without a GPU: interpreted against the oracle.

It is compiled ahead of time with those of the gated delta rule.
"""

from __future__ import annotations

from pathlib import Path

from helpers.triton_process import run_interpreted

HERE = Path(__file__).resolve().parent


def test_the_interpreted_kernel_equals_the_oracle() -> None:
    run_interpreted(HERE / "interpreted.py")
