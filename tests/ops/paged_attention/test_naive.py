"""The definition and what a CPU runs: the same outputs and pages."""

from __future__ import annotations

import pytest
import torch

from helpers.attention_cases import make_attention_batch
from hybridspec.ops.paged_attention import cpu, naive


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("page_dtype", [torch.float64, torch.float16], ids=str)
def test_equals_what_a_cpu_runs(page_dtype: torch.dtype, scale: float | None) -> None:
    found = []
    for backend in (naive, cpu):
        batch = make_attention_batch(
            [3, 0, 2, 1], [2, 5, 15, 30], [4, 1, -1, 0], tail_rows=1, page_dtype=page_dtype
        )
        out = torch.full_like(batch.q, torch.nan)
        backend.verify(*batch.call(3, scale, out))
        found.append((out, batch.k_pages, batch.v_pages))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12, equal_nan=True)
