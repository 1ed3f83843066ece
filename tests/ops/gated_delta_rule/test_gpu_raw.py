"""The compiled kernels of the raw ring against the oracle on a CUDA device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.gdn_cases import Dtypes, assert_same_bits, offsets
from helpers.raw_cases import (
    RAW,
    RAW_CASES,
    RAW_CUDA_CASES,
    RAW_LARGE,
    REGIMES,
    RawCall,
    RawCase,
)
from helpers.tolerances import error
from hybridspec.ops import gated_delta_rule

pytestmark = pytest.mark.gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MODES = {
    "bf16": Dtypes(BF16, BF16, BF16),
    "fp16": Dtypes(F16, F16, F16),
    "fp32_state": Dtypes(BF16, F32, BF16),
    "fp16_state": Dtypes(BF16, F16, BF16),
    "fp32": Dtypes(F32, F32, F32),
}
HEADS_OF_A_MODEL = replace(RAW_LARGE, heads=2, value_heads=8)


# Kernels are shared by cases of one geometry; others have one each, so they run in one mode.
@pytest.mark.parametrize(
    ("mode", "case"),
    [
        pytest.param(mode, case, id=f"{case.name}-{mode}")
        for mode in MODES
        for case in RAW_CASES
        if (case.geometry == RAW and case.use_qk_l2norm and not case.is_strided) or mode == "bf16"
    ],
)
def test_triton(mode: str, case: RawCase) -> None:
    RawCall(case.using(MODES[mode]), "cuda").check("triton", is_split=True)


@pytest.mark.parametrize("mode", ["bf16", "fp16", "fp32_state"])
@pytest.mark.parametrize("case", RAW_CUDA_CASES, ids=lambda case: case.name)
def test_cuda(mode: str, case: RawCase) -> None:
    RawCall(case.using(MODES[mode]), "cuda").check("cuda", is_split=True)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seed", range(3))
def test_a_fold_into_an_fp32_state(regime: str, backend: str, seed: int) -> None:
    case = RawCase(
        "fold", (4,) * 4, (12, 9, 1, 7), (29, 0, 3, 31), folds=(True,) * 4, regime=regime,
        seed=seed, geometry=replace(HEADS_OF_A_MODEL, max_window=12), dtypes=MODES["fp32_state"],
    )  # fmt: skip
    call = RawCall(case, "cuda")
    expected = [call.expected(i)[1] for i in range(4)]
    call.run(backend)
    for slot, state in zip(call.slots, expected, strict=True):
        assert error(call.state[slot].cpu(), state) < 1e-4


def test_replayed_graph() -> None:
    """Cursors, marks and rows change between replays, addresses do not."""
    case = RawCase("graph", (4, 4), (8, 3), (30, 3), geometry=RAW_LARGE, dtypes=MODES["bf16"])
    eager, captured = RawCall(case, "cuda"), RawCall(case, "cuda")
    usual = captured.inputs()
    captured.inputs = lambda: usual  # type: ignore[method-assign]
    before = [pool.clone() for pool in (captured.state, *captured.ring[:4])]
    out = torch.empty_like(usual[2])
    is_fold = torch.zeros(2, dtype=torch.int8, device="cuda")
    bounds = offsets(case.lengths, "cuda")
    slots = torch.tensor(captured.slots, dtype=torch.int32, device="cuda")

    def step() -> None:
        gated_delta_rule.verify_raw(
            *usual, captured.A_log, captured.dt_bias, captured.state, captured.ring, bounds, slots,
            max_verify_tokens=4, is_fold=is_fold, out=out,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for pool, old in zip((captured.state, *captured.ring[:4]), before, strict=True):
        pool.copy_(old)
    is_fold.copy_(torch.tensor(captured.folds, dtype=torch.int8))
    graph.replay()
    assert_same_bits(out, eager.run())
    assert_same_bits(captured.state, eager.state)
