"""The definition and what a CPU runs: the same outputs, rings and folded states."""

from __future__ import annotations

import pytest
import torch

from helpers.gdn_cases import Case, Dtypes, Geometry, VerifyCall
from hybridspec.ops.gated_delta_rule import FoldingBatch, Gates, Rows, State, cpu, naive

CASES = [
    Case("ragged", (3, 1, 8), (15, 0, 7), (30, 0, 31)),
    Case("padding", (2, 0, 4), (12, 9, 14), (0, 3, 17), slots=(2, 1, -1), tail=2),
    Case("shared heads", (4, 4), (16, 2), (29, 1), geometry=Geometry(2, 6, 16, 32)),
]


@pytest.mark.parametrize("options", [(None, True, 1.0), (0.5, False, 2.0)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_what_a_cpu_runs(case: Case, options: tuple) -> None:
    found = []
    for backend in (naive, cpu):
        call = VerifyCall(case.using(Dtypes()))
        pools, inputs = call.pools, call.inputs()
        out = torch.full_like(inputs[2], torch.nan)
        backend.verify(
            Rows(*inputs, out),
            Gates(call.tokens.A_log, call.tokens.dt_bias, *options),
            State(pools.state, None),
            pools.ring,
            FoldingBatch(call.cu_seqlens, call.slot_tensor, call.is_fold, max(case.lengths)),
        )
        found.append((out, *pools.tensors()))
    assert found[0][1].dtype == torch.float64
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11, equal_nan=True)
