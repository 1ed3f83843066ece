"""The noise's generator is the function that Triton offers to kernels."""

from __future__ import annotations

from pathlib import Path

from helpers.triton_process import run_interpreted


def test_noise_equals_the_generator_of_triton() -> None:
    run_interpreted(Path(__file__).resolve().parent / "interpreted.py")
