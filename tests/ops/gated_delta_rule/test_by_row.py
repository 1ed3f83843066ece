"""Verify with cursors of batch rows: equal to the slot-keyed op, and as an operator."""

from __future__ import annotations

import pytest
import torch

from helpers.gdn_cases import offsets
from helpers.gdn_row_calls import RowCall
from helpers.tolerances import assert_same
from hybridspec.ops import gated_delta_rule
from hybridspec.ops.ring import restart_windows

OPS = torch.ops.hybridspec


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", range(1, 9))
@pytest.mark.parametrize("capacity", [16, 32])
def test_compiled_kernels_equal_the_reference(num_tokens: int, capacity: int) -> None:
    """Thresholds, with and without an output: not all pairs, as each is a kernel to compile."""
    call = RowCall(num_tokens, capacity, device="cuda")
    for has_output, threshold in ((False, None), (False, 1), (True, call.geometry.max_window)):
        call.compare("triton", has_output, fold_threshold=threshold)
    call.slots, call.ring_start = None, None
    call.compare("triton", False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_sixteen_bits(dtype: torch.dtype) -> None:
    RowCall(2, 32).check_widening("reference", dtype, torch.float32)
    RowCall(2, 32).check_widening("reference", torch.float32, dtype)


@pytest.mark.parametrize("threshold", [None, 1, 6, 14])
def test_equal_to_cursors_of_slots(threshold: int | None) -> None:
    call = RowCall(3, 32)
    pools = [pool.clone() for pool in call.pools.tensors()[:4]]
    found = call.run(pools, fold_threshold=threshold)
    is_fold = None
    if threshold is not None:
        is_fold = (call.history_len >= threshold).to(torch.int8)
    expected = gated_delta_rule.verify(
        *(part.flatten(0, 1) for part in call.rows), call.A_log, call.dt_bias, call.pools.state,
        call.pools.ring, offsets([3, 3, 3]), call.slots, max_verify_tokens=3, is_fold=is_fold,
    )  # fmt: skip
    assert_same(found.flatten(0, 1), expected)
    for mine, other in zip(pools, call.pools.tensors()[:4], strict=True):
        assert_same(mine, other)


@pytest.mark.parametrize("has_all", [False, True])
def test_operators_pass_opcheck(has_all: bool) -> None:
    call = RowCall(2, 32)
    pools = [pool.nan_to_num() for pool in call.pools.tensors()[:4]]
    cursors = (call.history_len, *((call.ring_start, call.slots) if has_all else (None, None)))
    arguments = (
        *call.rows, torch.zeros(3, 2, 2, 16), call.A_log, call.dt_bias, 0.25, True, 1.0, pools[0],
        None, *pools[1:], *cursors[1::-1], 16, False, None, cursors[2], None, 2,
        9 if has_all else None, not has_all, -1, False, None, "auto",
    )  # fmt: skip
    torch.library.opcheck(OPS.gated_delta_rule_verify_rows.default, arguments)
    arguments = (call.ring_start, call.history_len, cursors[2], 9, 32, "auto")
    torch.library.opcheck(OPS.ring_restart_windows.default, arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_compiles_as_one_graph(backend: str) -> None:
    def step(call: RowCall, pools: list[torch.Tensor]) -> torch.Tensor:
        out = call.run(pools, fold_threshold=14)
        restart_windows(
            call.ring_start, call.history_len, call.slots, fold_threshold=14, ring_capacity=32
        )
        return 2.0 * out

    found = []
    for run in (step, torch.compile(step, fullgraph=True, backend=backend)):
        call = RowCall(3, 32)
        pools = [pool.nan_to_num() for pool in call.pools.tensors()[:4]]
        found.append([run(call, pools), *pools, call.ring_start, call.history_len])
    for actual, expected in zip(*found, strict=True):
        assert_same(actual, expected)
    assert found[0][-1].tolist() == [0, 1, 8]


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"max_window": 31}, ValueError, "max_verify_tokens: a window of 31 rows and 3 more need"),
        ({"max_window": 32}, ValueError, "ring.max_window: expected 1..31"),
        (
            {"slots": torch.zeros(2).int()},
            ValueError,
            r"slots: expected shape .* = \[3\], got \[2\]",
        ),
        ({"slots": torch.zeros(3)}, TypeError, "slots: expected dtype int32, got float32"),
        ({"ring_start": torch.zeros(4).int()}, ValueError, r"ring.ring_start: .* got \[4\]"),
        ({"out": torch.zeros(3, 3, 2, 8)}, ValueError, r"out: .* = \[3, 3, 2, 16\], got \[3, 3, 2"),
        ({"out": torch.zeros(3, 3, 2, 16).int()}, TypeError, "out: expected dtype float32"),
        ({"backend": "metal"}, ValueError, "backend: expected one of 'auto'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_calls(options: dict, kind: type[Exception], text: str) -> None:
    call = RowCall(3, 32)
    arguments = {
        "ring_start": call.ring_start, "slots": call.slots, "max_window": 16
    } | options  # fmt: skip
    with pytest.raises(kind, match=text):
        gated_delta_rule.verify_rows(
            *call.rows, call.A_log, call.dt_bias, *call.pools.tensors()[:4], call.history_len,
            **arguments,
        )  # fmt: skip
