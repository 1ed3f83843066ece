"""Rings that hold the log-decay of each token, and folds of requests without rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.gdn_cases import Case, Dtypes, Geometry, Pools, VerifyCall, assert_same_bits
from helpers.gdn_oracle import gates
from helpers.ring_cases import kernel_pools
from helpers.token_decays import hold_token_decays
from hybridspec.ops import gated_delta_rule
from hybridspec.ops.gated_delta_rule import FoldingBatch, Gates, Rows, State, naive

F64, F32 = torch.float64, torch.float32
INTERPRETED = [
    pytest.mark.interpreted,
    # Decays that are selected away may overflow; the interpreter's NumPy says so.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]
BACKENDS = [
    ("naive", F64),
    ("reference", F64),
    ("reference", F32),
    pytest.param("triton", F32, marks=INTERPRETED),
]
CASES = [
    Case("ragged", (3, 1, 8), (15, 0, 7), (30, 0, 31)),
    Case("padding", (2, 0, 4), (12, 9, 14), (0, 3, 17), slots=(2, 1, -1), tail=2),
    Case("strong", (4, 3), (16, 2), (29, 1), decay="-90", history_gap=90.0),
]


def run(call: VerifyCall, backend: str) -> Tensor:
    if backend != "naive":
        return call.run(backend)
    inputs, pools = call.inputs(), call.pools
    out = torch.full_like(inputs[2], torch.nan)
    naive.verify(
        Rows(*inputs, out),
        Gates(call.tokens.A_log, call.tokens.dt_bias, None, True, 1.0),
        State(pools.state, None),
        pools.ring,
        FoldingBatch(call.cu_seqlens, call.slot_tensor, call.is_fold, max(call.case.lengths)),
    )
    return out


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verify(case: Case, backend: str, dtype: torch.dtype) -> None:
    """As with sums, but for what is appended: the gates' own numbers."""
    case = case.using(Dtypes(dtype, dtype, dtype))
    summed, single = VerifyCall(case), VerifyCall(case)
    hold_token_decays(single.pools)
    expected, found = run(summed, "reference"), run(single, backend)
    bound = 1e-11 if dtype == F64 else 2e-5
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    pools, others = single.pools, summed.pools
    for mine, other in zip(pools.tensors()[:3], others.tensors()[:3], strict=True):
        torch.testing.assert_close(mine, other, rtol=bound, atol=bound, equal_nan=True)
    for i, (slot, n) in enumerate(zip(single.slots, case.lengths, strict=True)):
        if slot >= 0:
            first = int(single.cu_seqlens[i])
            appended = pools.ring.cum_log_decay[slot][:, pools.free_rows(slot, n)]
            decays = gates(single.tokens.rows(first, first + n))[0].T.to(dtype)
            torch.testing.assert_close(appended, decays, rtol=bound, atol=bound)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=INTERPRETED)])
@pytest.mark.parametrize("op", ["fold", "materialize"])
def test_states_after_rows(op: str, backend: str) -> None:
    def states(pools: Pools, backend: str) -> Tensor:
        slots = torch.tensor([3, 1, 0, -1], dtype=torch.int32)
        memory = (pools.state, pools.ring, slots)
        if op == "fold":
            marks = torch.tensor([1, 0, 1, 1], dtype=torch.int8)
            gated_delta_rule.fold(*memory, is_fold=marks, backend=backend)
        else:
            numbers = torch.tensor([[5, 6, 0, 2], [7, 99, 0, 3]], dtype=torch.int32)
            gated_delta_rule.materialize(*memory, *numbers, backend=backend)
        return pools.state

    summed, single = kernel_pools(), kernel_pools()
    hold_token_decays(single)
    expected = states(summed, "reference")
    found = states(single, backend)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_marked_requests_without_rows_fold(backend: str, dtype: torch.dtype) -> None:
    case = Case(
        "rowless", (0, 2, 0, 0), (5, 9, 0, 3), (30, 2, 0, 4), slots=(4, 2, 5, -1),
        folds=(True, True, True, True), tail=1, geometry=Geometry(2, 4, 16, 16),
        dtypes=Dtypes(dtype, dtype, dtype),
    )  # fmt: skip
    call, other = VerifyCall(case), VerifyCall(case)
    before = call.pools.copies()
    is_fold = torch.tensor([1, 0, 0, 0], dtype=torch.int8)
    gated_delta_rule.fold(
        other.pools.state, other.pools.ring, other.slot_tensor, is_fold=is_fold,
        backend="reference",
    )  # fmt: skip
    run(call, backend)
    bound = 1e-11 if dtype == F64 else 2e-5
    found, expected = call.pools.state[4], other.pools.state[4]
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    assert not torch.equal(found, before[0][4])
    for old, pool in zip(before, call.pools.tensors(), strict=True):
        for slot in range(case.geometry.num_slots):
            if slot != 2 and (slot != 4 or pool is not call.pools.state):
                assert_same_bits(pool[slot], old[slot])
