"""The kernels without a GPU: compiled, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.attention_cases import make_attention_batch
from helpers.triton_process import EXTENTS, run_with_compiler
from hybridspec.errors import UnsupportedError
from hybridspec.ops import paged_attention
from hybridspec.ops._checks import row_alignment

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize(
    "words", [*EXTENTS, pytest.param(("89",), marks=pytest.mark.slow, id="89")]
)
def test_compiled_kernels_fit(words: tuple[str, ...]) -> None:
    reports = json.loads(run_with_compiler(HERE / "compile_kernels.py", *words))
    assert {report["kernel"].rpartition(".")[2] for report in reports} == {
        "split_kernel",
        "finish_kernel",
        "piece_kernel",
        "join_kernel",
        "prefill_kernel",
    }
    limit = {"80": 163, "89": 99}.get(words[0], 227) * 1024
    for report in reports:
        assert report["shared_bytes"] <= limit, report
        assert report["stack_bytes"] <= 320, report  # outside the loop over keys


def test_addresses_are_as_aligned_as_the_least_of_them() -> None:
    rows = torch.zeros(4, 64, dtype=torch.float16)
    assert row_alignment(rows, rows[:, 8:]) == 16
    assert row_alignment(rows, rows[:, 4:]) == 8
    assert row_alignment(rows, rows.as_strided((2, 64), (66, 1))) == 4
    assert row_alignment(rows[:, 1:], rows) == 2


def test_refuses_a_cpu() -> None:
    batch = make_attention_batch([2], [3], [1], dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="'triton'.*not on a CUDA device|not installed"):
        paged_attention.verify(*batch.tensors, max_verify_tokens=2, backend="triton")
