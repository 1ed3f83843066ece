"""The CUDA C++ kernel with sums in one order: the oracle, and the same bits in every cut."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import cuda_on_cpu
from helpers.gdn_cases import Case, Dtypes, Geometry, VerifyCall, assert_same_bits
from helpers.gdn_kernel_cases import CUDA_CONFIGS, LARGE, NARROW, ORDERED_CASES, ORDERED_MODES
from helpers.gdn_walks import differing, random_tokens, run_walk
from helpers.guarded import move_to_the_end_of_memory
from helpers.partitions import WALKS
from hybridspec.errors import UnsupportedError
from hybridspec.ops._nvrtc import SOURCES
from hybridspec.ops.gated_delta_rule import api, launch_cuda, ordered_cuda

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BACKEND = "ordered_cuda"
WIDE_WINDOW = replace(NARROW, max_window=24)
# Kernels are built for one geometry, dtype and number of rows: each of them takes a second.
FEW = ("T4", "T6", "full", "strong-decay", "options")


@pytest.fixture(autouse=True)
def cuda_on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cuda, "load_kernel", cuda_on_cpu.load_kernel)
    served = api.VERIFY_BACKENDS[BACKEND]._replace(explain=ordered_cuda.explain_call)
    monkeypatch.setitem(api.VERIFY_BACKENDS, BACKEND, served)
    monkeypatch.setattr(api._verify, "_runs", {})  # what is remembered is for this test only


def operand(dtypes: Dtypes) -> torch.dtype:
    return F16 if dtypes.rows == F16 else BF16


@pytest.mark.parametrize(
    "case",
    [
        case.using(dtypes)
        for dtypes in ORDERED_MODES
        for case in ORDERED_CASES
        if (dtypes == ORDERED_MODES[0] and case.name != "V192") or case.name in FEW
    ],
    ids=str,
)
def test_verify(case: Case) -> None:
    VerifyCall(case).check(BACKEND, operand(case.dtypes))


def test_spare_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_cuda, "choose_config", lambda *_: CUDA_CONFIGS["spare-warps"])
    case = Case("split", (3, 2, 1), (15, 4, 0), slots=(3, 1, -1), tail=2, geometry=LARGE)
    VerifyCall(case.using(ORDERED_MODES[0])).check(BACKEND, BF16)


def test_nothing_behind_the_last_row_is_read() -> None:
    case = Case("end", (4, 3), (20, 5), (17, 0), slots=(0, 6), geometry=WIDE_WINDOW)
    call = VerifyCall(case.using(ORDERED_MODES[0]))
    move_to_the_end_of_memory(call)
    call.check(BACKEND, BF16)


def test_a_fold_without_any_row_has_the_same_bits() -> None:
    calls = [
        VerifyCall(
            Case("fold", (n,), (24,), folds=(True,), geometry=WIDE_WINDOW, dtypes=ORDERED_MODES[0])
        )
        for n in (0, 2)
    ]
    before = calls[0].pools.state.clone()
    for call in calls:
        call.run(BACKEND)
    assert_same_bits(calls[0].pools.state, calls[1].pools.state)
    assert not torch.equal(calls[0].pools.state[calls[0].slots[0]], before[calls[0].slots[0]])


@pytest.mark.parametrize("num_tokens", [4, 8])
def test_a_draft_that_is_no_number_harms_no_row_before_it(num_tokens: int) -> None:
    case = Case("draft", (num_tokens,), (9,), geometry=WIDE_WINDOW, dtypes=ORDERED_MODES[0])
    usual, spoilt = VerifyCall(case), VerifyCall(case)
    inputs = spoilt.inputs()
    for part in inputs:
        part[2:] = torch.nan
    spoilt.inputs = lambda: inputs
    expected, actual = usual.run(BACKEND), spoilt.run(BACKEND)
    assert_same_bits(actual[:2], expected[:2])
    assert actual[2:].isnan().all()
    rows = usual.pools.free_rows(usual.slots[0], 2)
    for pool, other in zip(spoilt.pools.ring[:3], usual.pools.ring[:3], strict=True):
        assert_same_bits(pool[usual.slots[0]][:, rows], other[usual.slots[0]][:, rows])


@pytest.mark.parametrize(("state_dtype", "lengths"), [(BF16, (26, 20)), (F32, (26,))], ids=str)
def test_every_cut_gives_the_same_bits(state_dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    tokens = random_tokens(state_dtype, "cpu", lengths, heads=1)
    # Built for 4 rows of a request, then for 8.
    expected = run_walk(WALKS["one by one"], tokens, BACKEND, max_rows=1)
    for name in ("eight at a time", "random"):
        assert differing(run_walk(WALKS[name], tokens, BACKEND), expected) == 0, name


RELAXED = {
    "u with more bits within a step": {
        "ACT::pack(of[0]": "Fp16::pack(of[0]",
        "ACT::first(u[pair])": "Fp16::first(u[pair])",
        "ACT::second(u[pair])": "Fp16::second(u[pair])",
    },
    "coefficients of stored rows in 16 bits": {
        "dots[2 * tile + i] * between : -0.f":
            "ACT::first(ACT::pack(dots[2 * tile + i] * between, 0)) : -0.f",
    },
    "decays of a step added up by themselves": {
        "float total = before, decay = before": "float total = 0, decay = 0",
        "return decay;": "return before + decay;",
    },
}  # fmt: skip


@pytest.mark.parametrize("edits", RELAXED.values(), ids=RELAXED)
def test_what_is_relaxed_is_seen(
    edits: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "gated_delta_rule"
    shutil.copytree(SOURCES / "gated_delta_rule", folder)
    source = folder / "verify_ordered.cu"
    text = source.read_text()
    for strict, relaxed in edits.items():
        assert text.count(strict) == 1
        text = text.replace(strict, relaxed)
    source.write_text(text)
    monkeypatch.setattr(cuda_on_cpu, "SOURCES", tmp_path)
    monkeypatch.setattr(
        launch_cuda, "load_kernel", functools.cache(cuda_on_cpu.load_kernel.__wrapped__)
    )
    tokens = random_tokens(BF16, "cpu", (22, 19), heads=1)
    expected = run_walk(WALKS["one by one"], tokens, BACKEND)
    assert differing(run_walk(WALKS["eight at a time"], tokens, BACKEND), expected)


@pytest.mark.parametrize(
    ("dtypes", "geometry", "reason"),
    [
        (ORDERED_MODES[0], replace(NARROW, max_window=25), "ring.max_window is 25, it takes up to"),
        (ORDERED_MODES[0], replace(NARROW, key_dim=64), "heads have K = 64"),
        (Dtypes(BF16, BF16, F32), WIDE_WINDOW, "ring.k has dtype float32"),
        (Dtypes(BF16, torch.int8, BF16), WIDE_WINDOW, "states have 8 bits"),
    ],
    ids=["window", "heads", "ring", "int8"],
)
def test_what_it_refuses(dtypes: Dtypes, geometry: Geometry, reason: str) -> None:
    call = VerifyCall(Case("left", (2,), (3,), geometry=geometry, dtypes=dtypes))
    with pytest.raises(UnsupportedError, match=reason):
        call.run(BACKEND)
