"""The definition and what a CPU runs: the same outputs and rings."""

from __future__ import annotations

import pytest
import torch

from helpers.conv_cases import make_conv_batch
from hybridspec.ops.causal_conv1d import Batch, Log, Rows, Taps, cpu, naive


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_equals_what_a_cpu_runs(has_bias: bool, activation: str | None) -> None:
    found = []
    for backend in (naive, cpu):
        batch = make_conv_batch(
            [3, 0, 2, 1], [2, 5, 15, 0], [4, 1, -1, 0], tail_rows=1, has_bias=has_bias
        )
        out = torch.full_like(batch.x, torch.nan)
        backend.verify(
            Rows(batch.x, out),
            Taps(batch.weight, batch.bias, activation),
            Log(batch.conv_ring, batch.seq_len),
            Batch(batch.cu_seqlens, batch.slots, 3),
        )
        found.append((out, batch.conv_ring))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12, equal_nan=True)
