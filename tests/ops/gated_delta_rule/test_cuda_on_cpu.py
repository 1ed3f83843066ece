"""The CUDA C++ kernel against the oracle, compiled for the CPU and run lane by lane."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import cuda_on_cpu
from helpers.far_memory import far_apart
from helpers.gdn_cases import Case, Dtypes, VerifyCall, assert_same_bits
from helpers.gdn_kernel_cases import CUDA_CASES, CUDA_CONFIGS, CUDA_MODES, LARGE, NARROW
from helpers.gdn_row_calls import RowCall
from helpers.guarded import move_to_the_end_of_memory
from helpers.thinned import thinned
from hybridspec.compat.flashinfer import gated_delta_rule_mtp_ucache_flush
from hybridspec.errors import UnsupportedError
from hybridspec.ops._nvrtc import SOURCES
from hybridspec.ops.gated_delta_rule import (
    FoldingBatch,
    Gates,
    Rows,
    State,
    api,
    launch_cuda,
    row_cursors,
)
from hybridspec.ops.gated_delta_rule.int8_state import quantise
from hybridspec.ops.ring import RingView

F32, F16, BF16, I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8


@pytest.fixture(autouse=True)
def cuda_on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cuda, "load_kernel", cuda_on_cpu.load_kernel)
    served = api.VERIFY_BACKENDS["cuda"]._replace(explain=launch_cuda.explain_tensors)
    monkeypatch.setitem(api.VERIFY_BACKENDS, "cuda", served)
    for op in (api._verify, row_cursors._verify_rows):  # what is remembered is for this test only
        monkeypatch.setattr(op, "_runs", {})


def operand(dtypes: Dtypes) -> torch.dtype:
    return F16 if dtypes.rows == F16 else BF16


@pytest.mark.parametrize(("case", "dtypes"), thinned(CUDA_CASES, CUDA_MODES))
def test_verify(case: Case, dtypes: Dtypes) -> None:
    VerifyCall(case.using(dtypes)).check("cuda", operand(dtypes))


@pytest.mark.parametrize(("name", "dtypes"), thinned(list(CUDA_CONFIGS), CUDA_MODES))
def test_every_split_of_a_head(name: str, dtypes: Dtypes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cuda, "choose_config", lambda *sizes: CUDA_CONFIGS[name])
    case = Case("split", (3, 2, 1), (15, 4, 0), slots=(3, 1, -1), tail=2, geometry=LARGE)
    call = VerifyCall(case.using(dtypes))
    # Behind the batch lies what could be a fourth request.
    call.slot_tensor = torch.tensor([3, 1, -1, 0], dtype=torch.int32)[:3]
    call.cu_seqlens = torch.tensor([0, 3, 5, 6, 8], dtype=torch.int32)[:4]
    call.check("cuda", operand(dtypes))


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
    call.slots = None
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


def test_params_are_those_of_the_kernel() -> None:
    header = (SOURCES / "gated_delta_rule" / "verify_layout.cuh").read_text()
    body = re.sub("//.*", "", re.search(r"struct Params \{(.*?)\n\};", header, re.DOTALL)[1])
    names = re.findall(r"(\w+)[,;]", body)
    assert names == [name for name, _ in launch_cuda.Params._fields_]


@pytest.mark.parametrize(
    ("A_log", "dt_bias"), [(F32, BF16), (BF16, F16), (F16, F32), (BF16, BF16)], ids=str
)
def test_parameters_of_any_dtype(A_log: torch.dtype, dt_bias: torch.dtype) -> None:
    RowCall(3, 32, head_dim=128, dtype=BF16).check_widening("cuda", A_log, dt_bias)
    call = VerifyCall(Case("narrow", (3,), (14,), geometry=NARROW, dtypes=CUDA_MODES[1]))
    tokens = call.tokens
    call.tokens = replace(tokens, A_log=tokens.A_log.to(A_log), dt_bias=tokens.dt_bias.to(dt_bias))
    call.check("cuda", F16)


def test_parameters_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's callers pass 16 bits: a cast of each would be two launches more a call."""
    passed = []

    class Kernel:
        def launch(self, num_blocks: int, params: launch_cuda.Params) -> None:
            passed.append((params.A_log, params.dt_bias))

    monkeypatch.setattr(launch_cuda, "load_kernel", lambda *build: Kernel())
    monkeypatch.setattr(
        row_cursors._verify_rows, "backends", {"reference": row_cursors._backend("cuda")}
    )
    call = RowCall(4, 32, head_dim=128, dtype=BF16)
    A_log, dt_bias = call.A_log.bfloat16(), call.dt_bias.bfloat16()
    gated_delta_rule_mtp_ucache_flush(
        A_log, call.rows[3], dt_bias, q=call.rows[0], k=call.rows[1], v=call.rows[2],
        b=call.rows[4], initial_state_source=call.pools.state, k_cache=call.pools.ring.k,
        u_cache=call.pools.ring.u, g_cache=call.pools.ring.cum_log_decay,
        hist_len=call.history_len.clamp(max=12), initial_state_indices=call.slots,
        cache_base=call.ring_start, restart_hist_on_flush=False,
    )  # fmt: skip
    assert passed == [(A_log.data_ptr(), dt_bias.data_ptr())]


def test_fp64_parameters() -> None:
    call = VerifyCall(Case("fp64", (3,), (14,), geometry=NARROW, dtypes=CUDA_MODES[0]))
    wide = {name: getattr(call.tokens, name).double() for name in ("A_log", "dt_bias")}
    call.tokens = replace(call.tokens, **wide)
    call.check("cuda", BF16)


def test_nothing_behind_the_last_row_is_read() -> None:
    case = Case("end", (4, 3), (12, 5), (17, 0), slots=(0, 6), geometry=NARROW)
    call = VerifyCall(case.using(CUDA_MODES[0]))
    move_to_the_end_of_memory(call)
    call.check("cuda", BF16)


@pytest.mark.parametrize("dtypes", CUDA_MODES, ids=str)
@pytest.mark.parametrize("num_tokens", [4, 8])
def test_a_query_that_is_no_number_harms_its_own_outputs_only(
    num_tokens: int, dtypes: Dtypes
) -> None:
    case = Case("query", (num_tokens, 2), (14, 3), geometry=LARGE, dtypes=dtypes)
    usual, spoilt = VerifyCall(case), VerifyCall(case)
    inputs = spoilt.inputs()
    inputs[0][1, 0] = torch.nan  # of the second token and the first key head
    spoilt.inputs = lambda: inputs
    expected, actual = usual.run("cuda"), spoilt.run("cuda")
    for pool, other in zip(spoilt.pools.tensors(), usual.pools.tensors(), strict=True):
        assert_same_bits(pool, other)
    is_harmed = torch.zeros(expected.shape, dtype=torch.bool)
    is_harmed[1, :2] = True
    assert actual[is_harmed].isnan().all()
    assert_same_bits(actual, expected, ~is_harmed)


def test_fp32_states_are_read_with_more_than_16_bits() -> None:
    """Differences of columns that agree in their first 16 bits."""
    call = VerifyCall(Case("bits", (1,), (0,), slots=(2,), geometry=NARROW, dtypes=CUDA_MODES[2]))
    q, k = torch.zeros(2, 1, 1, 128, dtype=BF16)
    q[..., 0], q[..., 1], k[..., 2] = 1.0, -1.0, 1.0
    call.tokens = replace(call.tokens, q=q, k=k)
    call.pools.state[2, 0, :, 0] = 1 + torch.arange(64) / 4096
    call.pools.state[2, 0, :, 1] = 1.0
    call.check("cuda", BF16)


def fold_of_nothing(dtypes: Dtypes, log_decay: float) -> VerifyCall:
    """A call that folds 16 rows without corrections into slot 0."""
    case = Case("nothing", (2,), (16,), slots=(0,), geometry=NARROW, dtypes=dtypes)
    call = VerifyCall(case)
    call.pools.ring.u[0] = 0.0
    call.pools.ring.cum_log_decay[0] = log_decay
    return call


@pytest.mark.parametrize("dtypes", CUDA_MODES, ids=str)
def test_a_fold_that_adds_nothing_keeps_every_bit(dtypes: Dtypes) -> None:
    call = fold_of_nothing(dtypes, 0.0)
    state, *_, last = call.pools.copies()
    call.run("cuda")
    assert_same_bits(call.pools.state, state)
    assert_same_bits(call.pools.tensors()[-1], last)  # factors where there are any


def test_8_bit_states_are_rounded_like_those_of_the_oracle() -> None:
    """Where a fold adds to each value row a number that 16 bits hold."""
    call = fold_of_nothing(CUDA_MODES[3], -0.3)
    pools = call.pools
    added = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    pools.ring.k[0, 0, 3], pools.ring.u[0, 0, 3] = 1.0, added
    state, scale = torch.empty_like(pools.state[0]), torch.empty_like(pools.state_scale[0])
    folded = pools.checkpoint(0).float() * torch.tensor(-0.3).exp() + added[:, None]
    quantise(folded, state, scale)
    call.run("cuda")
    # Products are rounded in another order: a factor close to a tie may go the other way.
    assert pools.state_scale[0].ne(scale).sum() <= 2
    assert pools.state[0].ne(state).sum() <= 2 * 32


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_groups_that_vanish_or_are_not_finite(value: float) -> None:
    call = fold_of_nothing(CUDA_MODES[3], -75.0)
    call.pools.ring.u[0, 0, 3, 40] = value
    call.run("cuda")
    rows = torch.arange(64) != 40
    assert not call.pools.state[0, 0, rows].any() and not call.pools.state_scale[0, 0, rows].any()
    assert call.pools.checkpoint(0)[0, 40].isnan().all()


@pytest.mark.parametrize("num_tokens", [3, 6])
@pytest.mark.parametrize(("size", "scale"), [(1.0, 3e6), (1.0, 1e-6), (1e5, 1.0), (1e-4, 1.0)])
def test_8_bit_states_take_rows_of_any_length(num_tokens: int, size: float, scale: float) -> None:
    """They are multiplied in fp16, whose range is small."""
    has_norm = size == 1.0
    case = Case(
        "rows", (num_tokens, 1), (13, 3), geometry=NARROW, dtypes=CUDA_MODES[3],
        use_qk_l2norm=has_norm, scale=scale,
    )  # fmt: skip
    call = VerifyCall(case)
    call.tokens = replace(call.tokens, q=size * call.tokens.q)
    call.check("cuda", BF16)


def test_a_slot_past_two_to_the_32nd_element(tmp_path: Path) -> None:
    geometry = replace(NARROW, num_slots=4)
    case = Case("far", (3,), (14,), (29,), slots=(3,), geometry=geometry, dtypes=CUDA_MODES[0])
    near, call = VerifyCall(case), VerifyCall(case)
    ring = call.pools.ring
    pools = [call.pools.state, ring.k, ring.u, ring.cum_log_decay]
    far = [far_apart(pool, 4, 3 * 2**29, tmp_path / str(i)) for i, pool in enumerate(pools)]
    for there, here in zip(far, pools, strict=True):
        there[3] = here[3]
    call.pools.state = far[0]
    call.pools.ring = ring._replace(k=far[1], u=far[2], cum_log_decay=far[3])
    assert_same_bits(call.run("cuda"), near.run("cuda"))
    for there, here in zip(far, near.pools.tensors(), strict=False):
        assert_same_bits(there[3], here[3])


@pytest.mark.parametrize(
    ("case", "dtypes", "reason"),
    [
        (Case("K64", (1,), (0,), geometry=replace(NARROW, key_dim=64)), CUDA_MODES[0], "K = 64"),
        (Case("V32", (1,), (0,), geometry=replace(NARROW, value_dim=32)), CUDA_MODES[0], "V = 32"),
        (Case("T9", (9,), (0,), geometry=NARROW), CUDA_MODES[0], "max_verify_tokens is 9"),
        (Case("fp32", (1,), (0,), geometry=NARROW), Dtypes(F32, F32, F32), "q has dtype float32"),
        (Case("ring", (1,), (0,), geometry=NARROW), Dtypes(BF16, BF16, F16), "ring.k has dtype"),
        (Case("state", (1,), (0,), geometry=NARROW), Dtypes(BF16, F16, BF16), "state has dtype"),
        (Case("wide", (1,), (0,), geometry=NARROW), Dtypes(F16, F32, F16), "state has dtype fl"),
        (Case("V320", (1,), (0,), geometry=replace(NARROW, value_dim=320)), CUDA_MODES[0], "320"),
        (
            Case("W17", (1,), (0,), geometry=replace(NARROW, max_window=17)),
            CUDA_MODES[0],
            "max_window is 17",
        ),
        (Case("off", (1,), (0,), geometry=NARROW, is_strided=True), CUDA_MODES[0], "16-byte"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else None,
)
def test_what_it_refuses(case: Case, dtypes: Dtypes, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        VerifyCall(case.using(dtypes)).run("cuda")


def apart(*shape: int, step: int = 2) -> torch.Tensor:
    """Zeros whose neighbours in the last dimension are `step` elements apart."""
    return torch.zeros(*shape[:-1], step * shape[-1])[..., ::step]


CALL = {
    "q": torch.zeros(2, 1, 128, dtype=BF16),
    "k": torch.zeros(2, 1, 128, dtype=BF16),
    "v": torch.zeros(2, 1, 64, dtype=BF16),
    "a": torch.zeros(2, 1),
    "b": torch.zeros(2, 1),
    "state": torch.zeros(3, 1, 64, 128, dtype=BF16),
    "out": torch.zeros(2, 1, 64, dtype=BF16),
}
RING = {
    "k": torch.zeros(3, 1, 32, 128, dtype=BF16),
    "u": torch.zeros(3, 1, 32, 64, dtype=BF16),
    "cum_log_decay": torch.zeros(3, 1, 32),
    "ring_start": torch.zeros(3, dtype=torch.int32),
    "history_len": torch.zeros(3, dtype=torch.int32),
}
SHIFTED = torch.zeros(2 * 128 + 4, dtype=BF16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"b": CALL["b"].bfloat16()}, "a and b have dtypes float32 and bfloat16"),
        ({"out": CALL["out"].float()}, "out has dtype float32, q has bfloat16"),
        ({"cum_log_decay": RING["cum_log_decay"].double()}, "cum_log_decay is not fp32"),
        ({"cum_log_decay": apart(3, 1, 32)}, "cum_log_decay is not fp32 with a last stride of 1"),
        ({"q": SHIFTED[4:].view(2, 1, 128)}, "q does not lie on 16-byte boundaries"),
        ({"out": SHIFTED[4:132].view(2, 1, 64)}, "out does not lie on 16-byte boundaries"),
        ({"v": SHIFTED[:136].as_strided((2, 1, 64), (68, 68, 1))}, "v does not lie on 16-byte"),
        (
            {"state": torch.empty(2, 1, 2**24, 128, dtype=BF16, device="meta")[:, :, :64]},
            "state has a stride of 4294967296 bytes",
        ),
    ],
)
def test_what_it_says_of_tensors(changes: dict[str, torch.Tensor], reason: str) -> None:
    def explain(**changed: torch.Tensor) -> str | None:
        ring = RingView(**{name: changed.pop(name, tensor) for name, tensor in RING.items()})
        rows = CALL | changed
        state = State(rows.pop("state"), None)
        gates, batch = Gates(None, None, None, True, 1.0), FoldingBatch(None, None, None, 4)
        return launch_cuda.explain_tensors(Rows(**rows), gates, state, ring, batch)

    assert explain() is None
    assert reason in explain(**changes)


@pytest.mark.parametrize(
    "factors",
    [
        torch.zeros(3, 1, 64, 8, dtype=BF16)[..., :4],
        torch.zeros(3 * 256 + 4, dtype=BF16)[4:].view(3, 1, 64, 4),
        torch.zeros(3, 260, dtype=BF16)[:, :256].view(3, 1, 64, 4),
    ],
    ids=["rows", "address", "slots"],
)
def test_factors_that_lie_apart(factors: torch.Tensor) -> None:
    geometry = replace(NARROW, num_slots=3)
    call = VerifyCall(Case("factors", (1,), (0,), geometry=geometry, dtypes=CUDA_MODES[3]))
    with pytest.raises(UnsupportedError, match="state_scale: the CUDA kernel takes factors of"):
        call.run("cuda", state_scale=factors)
