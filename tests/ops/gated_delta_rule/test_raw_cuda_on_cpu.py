"""The CUDA C++ kernel of the raw ring against the oracle, run lane by lane on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from helpers import cuda_on_cpu
from helpers.gdn_cases import Dtypes, assert_same_bits
from helpers.gdn_kernel_cases import CUDA_CONFIGS
from helpers.raw_cases import RAW_CUDA_CASES, RAW_LARGE, RAW_NARROW, REGIMES, RawCall, RawCase
from helpers.thinned import thinned
from helpers.tolerances import error
from hybridspec.errors import UnsupportedError
from hybridspec.ops._nvrtc import SOURCES
from hybridspec.ops.gated_delta_rule import launch_cuda, raw, raw_cuda

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MODES = [Dtypes(BF16, BF16, BF16), Dtypes(F16, F16, F16), Dtypes(BF16, F32, BF16)]


@pytest.fixture(autouse=True)
def cuda_on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cuda, "load_kernel", cuda_on_cpu.load_kernel)
    served = raw.RAW_BACKENDS["cuda"]._replace(explain=raw_cuda.explain_call)
    monkeypatch.setitem(raw.RAW_BACKENDS, "cuda", served)
    monkeypatch.setattr(raw._verify_raw, "_runs", {})  # what is remembered is for this test only


@pytest.mark.parametrize(("case", "dtypes"), thinned(RAW_CUDA_CASES, MODES))
def test_verify(case: RawCase, dtypes: Dtypes) -> None:
    RawCall(case.using(dtypes)).check("cuda", is_split=True)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("history", [1, 5, 8])
def test_a_fold_into_an_fp32_state(regime: str, history: int) -> None:
    """Nothing was rounded to 16 bits on the way."""
    case = RawCase("fold", (4,), (history,), (29,), folds=(True,), regime=regime)
    call = RawCall(case.using(MODES[2], geometry=RAW_NARROW))
    _, expected = call.expected(0)
    call.run("cuda")
    assert error(call.state[call.slots[0]], expected) < 4e-5


@pytest.mark.parametrize(("name", "dtypes"), thinned(list(CUDA_CONFIGS), MODES))
def test_every_split_of_a_head(name: str, dtypes: Dtypes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_cuda, "choose_config", lambda *sizes: CUDA_CONFIGS[name])
    case = RawCase("split", (3, 2, 1), (8, 4, 0), slots=(3, 1, -1), tail=2, geometry=RAW_LARGE)
    RawCall(case.using(dtypes)).check("cuda", is_split=True)


def test_without_is_fold_the_checkpoints_are_not_written() -> None:
    call = RawCall(RawCase("plain", (4, 3), (8, 0), (30, 1), geometry=RAW_NARROW, dtypes=MODES[0]))
    call.folds = (False, False)
    call.check("cuda", is_split=True, is_fold=None)


def test_fp32_gates_and_parameters_of_16_bits() -> None:
    call = RawCall(RawCase("gates", (4, 3), (8, 5), geometry=RAW_NARROW, dtypes=MODES[0]))
    call.rows[3:] = [part.float() for part in call.rows[3:]]
    call.A_log, call.dt_bias = call.A_log.to(BF16), call.dt_bias.to(F16)
    call.check("cuda", is_split=True)


def test_params_are_those_of_the_kernel() -> None:
    header = (SOURCES / "gated_delta_rule" / "raw_system.cuh").read_text()
    body = re.sub("//.*", "", re.search(r"struct Params \{(.*?)\n\};", header, re.DOTALL)[1])
    names = re.findall(r"(\w+)[,;]", body)
    assert names == [name for name, _ in raw_cuda.Params._fields_]


def test_slices_of_fused_projections() -> None:
    call, other = (
        RawCall(RawCase("fused", (4, 2), (8, 5), geometry=RAW_LARGE, dtypes=MODES[0]))
        for _ in range(2)
    )
    usual = call.inputs()
    qkv = torch.cat([part.flatten(1) for part in usual[:3]], 1)
    parts = qkv.split([part[0].numel() for part in usual[:3]], 1)
    gates = torch.cat(usual[3:], 1).split(4, 1)
    call.inputs = lambda: [
        *(part.view(like.shape) for part, like in zip(parts, usual, strict=False)), *gates
    ]  # fmt: skip
    assert_same_bits(call.run("cuda"), other.run("cuda"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"geometry": replace(RAW_NARROW, key_dim=64)}, "K = 64"),
        ({"geometry": replace(RAW_NARROW, value_dim=48)}, "V = 48"),
        ({"geometry": replace(RAW_NARROW, max_window=14)}, "16 together"),
        ({"dtypes": Dtypes(F32, F32, F32)}, "q has dtype float32"),
        ({"dtypes": Dtypes(BF16, F16, BF16)}, "state has dtype float16"),
        ({"dtypes": Dtypes(BF16, BF16, F16)}, "ring.k has dtype float16"),
    ],
)
def test_what_it_does_not_take(changes: dict, text: str) -> None:
    case = RawCase("other", (3,), (4,), geometry=RAW_NARROW, dtypes=MODES[0])
    with pytest.raises(UnsupportedError, match=text):
        RawCall(replace(case, **changes)).run("cuda")
