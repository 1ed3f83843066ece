"""The CUDA C++ kernel against the oracle, compiled for the CPU and run lane by lane."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import cuda_on_cpu
from helpers.gdn_cases import Case, Dtypes, VerifyCall, assert_same_bits
from helpers.gdn_kernel_cases import CUDA_CASES, CUDA_MODES, LARGE, NARROW
from helpers.gdn_row_calls import RowCall
from hybridspec.errors import UnsupportedError
from hybridspec.ops.gated_delta_rule import launch_cuda
from hybridspec.ops.gated_delta_rule.launch_cuda import CudaConfig

F32, F16, BF16, I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8


@pytest.fixture(autouse=True)
def cuda_on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cuda, "load_kernel", cuda_on_cpu.load_kernel)
    monkeypatch.setattr(launch_cuda, "explain_verify", launch_cuda.explain_tensors)


def operand(dtypes: Dtypes) -> torch.dtype:
    return F16 if dtypes.rows == F16 else BF16


@pytest.mark.parametrize("dtypes", CUDA_MODES, ids=str)
@pytest.mark.parametrize("case", CUDA_CASES, ids=lambda case: case.name)
def test_verify(case: Case, dtypes: Dtypes) -> None:
    VerifyCall(case.using(dtypes)).check("cuda", operand(dtypes))


@pytest.mark.parametrize("dtypes", CUDA_MODES, ids=str)
@pytest.mark.parametrize(
    "config",
    [
        CudaConfig(splits=1, warps=2, blocks=1, evict_first=False),
        CudaConfig(splits=4, warps=4, blocks=1, evict_first=True),
    ],
    ids=["a-warp-a-head", "four-warps-a-head"],
)
def test_every_split_of_a_head(
    config: CudaConfig, dtypes: Dtypes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_cuda, "choose_config", lambda *sizes: config)
    case = Case("split", (3, 2, 1), (15, 4, 0), slots=(3, 1, -1), tail=2, geometry=LARGE)
    VerifyCall(case.using(dtypes)).check("cuda", operand(dtypes))


def test_without_is_fold_the_checkpoints_are_not_written() -> None:
    case = Case("plain", (4, 3), (12, 0), (30, 1), geometry=NARROW, dtypes=CUDA_MODES[0])
    VerifyCall(case).check("cuda", BF16, is_fold=None)


@pytest.mark.parametrize("has_output", [False, True])
@pytest.mark.parametrize(("num_tokens", "capacity"), [(4, 32), (3, 16)])
def test_cursors_by_row(num_tokens: int, capacity: int, has_output: bool) -> None:
    call = RowCall(num_tokens, capacity, head_dim=128, dtype=BF16)
    call.compare("cuda", has_output, bound=4e-2, fold_threshold=13)
    call.ring_start = None
    call.compare("cuda", has_output, bound=4e-2)


def test_fp32_gates() -> None:
    call = VerifyCall(Case("gates", (4, 3), (12, 5), geometry=NARROW, dtypes=CUDA_MODES[0]))
    usual = call.inputs
    call.inputs = lambda: [*usual()[:3], *(part.float() for part in usual()[3:])]
    call.check("cuda", BF16)


def test_fused_projections() -> None:
    """q, k and v as slices of one tensor, a and b of another."""
    call = VerifyCall(Case("fused", (4, 2), (12, 5), geometry=LARGE, dtypes=CUDA_MODES[0]))
    separate = VerifyCall(call.case).run("cuda")
    usual = call.inputs()
    qkv = torch.cat([part.flatten(1) for part in usual[:3]], 1)
    parts = qkv.split([part[0].numel() for part in usual[:3]], 1)
    gates = torch.cat(usual[3:], 1).split(4, 1)
    fused = [part.view(like.shape) for part, like in zip(parts, usual, strict=False)]
    call.inputs = lambda: [*fused, *gates]
    assert_same_bits(call.run("cuda"), separate)


@pytest.mark.parametrize(
    ("case", "dtypes", "reason"),
    [
        (Case("K64", (1,), (0,), geometry=replace(NARROW, key_dim=64)), CUDA_MODES[0], "K = 64"),
        (Case("V32", (1,), (0,), geometry=replace(NARROW, value_dim=32)), CUDA_MODES[0], "V = 32"),
        (Case("T9", (9,), (0,), geometry=NARROW), CUDA_MODES[0], "max_verify_tokens is 9"),
        (Case("fp32", (1,), (0,), geometry=NARROW), Dtypes(F32, F32, F32), "q has dtype float32"),
        (Case("ring", (1,), (0,), geometry=NARROW), Dtypes(BF16, BF16, F16), "ring.k has dtype"),
        (Case("state", (1,), (0,), geometry=NARROW), Dtypes(BF16, F16, BF16), "state has dtype"),
        (Case("off", (1,), (0,), geometry=NARROW, is_strided=True), CUDA_MODES[0], "16-byte"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else None,
)
def test_what_it_refuses(case: Case, dtypes: Dtypes, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        VerifyCall(case.using(dtypes)).run("cuda")
