"""FlashInfer's names, argument names, order, shapes, guards and meaning."""

from __future__ import annotations

import inspect
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from helpers.flashinfer_sessions import FlashSession
from helpers.gdn_cases import Dtypes, Geometry, Pools, assert_same_bits, make_tokens, offsets
from helpers.gdn_oracle import gates, prepared, recurrence, window_state
from helpers.no_sync import no_sync
from helpers.tolerances import assert_close, assert_same
from hybridspec.compat import flashinfer
from hybridspec.ops import gated_delta_rule

LIST = (
    "A_log, a, dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=None, k=None, v=None, "
    "b=None, initial_state_source=None, initial_state_indices=None, output_state_indices=None, "
    "intermediate_states_buffer=None, accepted_steps=None, ssm_state_indices=None, "
    "disable_state_update=False, use_qk_l2norm_in_kernel=True, scale=None, output=None, "
    "disable_output=False, recovery_steps=0, k_cache=None, u_cache=None, g_cache=None, "
    "hist_len=None"
)
FLUSH = ", cache_base=None, flush_min=None, restart_hist_on_flush=True, pdl_trigger=False"
FLUSH += ", stochastic_rounding=False, rand_seed=None"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
MODES = {
    "fp64": Dtypes(F64, F64, F64),
    "bf16": Dtypes(BF16, BF16, BF16),
    "fp16_io": Dtypes(F16, F16, F16),
    "fp16_state": Dtypes(BF16, F16, BF16),
    "ring_fp16": Dtypes(BF16, BF16, F16),
    "fp16_state_cache": Dtypes(BF16, F16, F16),
    "fp32_state": Dtypes(BF16, F32, BF16),
}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (flashinfer.gated_delta_rule_mtp_ucache_flush, LIST + FLUSH),
        (flashinfer.gated_delta_rule_mtp_ucache, LIST + ", use_pdl=False"),
    ],
)
def test_signature(function, expected: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    written = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(written) == expected
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


class Call:
    """Three requests, one of them padding, in FlashInfer's layout."""

    def __init__(
        self,
        device: str = "cpu",
        rows: int = 4,
        *,
        is_flat: bool = False,
        dtypes: Dtypes | None = None,
    ) -> None:
        if dtypes is None:
            dtypes = Dtypes(F32, F32, F32) if device == "cpu" else Dtypes(BF16, BF16, BF16)
        g = Geometry(2, 4, 32, 16, 16 if is_flat else 32, 8 if is_flat else 16)
        self.geometry, self.dtypes, self.rows, self.device = g, dtypes, rows, device
        generator = torch.Generator().manual_seed(rows)
        self.is_flat = is_flat
        self.history = (16 - rows, 3, 0) if is_flat else (13, 5, 15)
        self.starts = (0, 0, 0) if is_flat else (30, 9, 3)
        self.slots = (4, 1, -1)
        self.pools, self.expected = (Pools.create(g, dtypes, device) for _ in range(2))
        for slot, start, history in zip(self.slots, self.starts, self.history, strict=True):
            if slot >= 0:
                self.pools.fill_slot(slot, start, history, generator)
        for mine, other in zip(self.pools.tensors(), self.expected.tensors(), strict=True):
            other.copy_(mine)
        self.tokens = make_tokens(g, 3 * rows, generator, dtypes.rows)
        self.packed = [part.to(device) for part in self.tokens.packed()]
        self.A_log, self.dt_bias = self.tokens.A_log.to(device), self.tokens.dt_bias.to(device)
        self.hist_len, self.cache_base, self.indices = (
            torch.tensor(values, dtype=torch.int32, device=device)
            for values in (self.history, self.starts, self.slots)
        )

    def arguments(self, **changes: object) -> dict:
        q, k, v, a, b = (part.unflatten(0, (3, self.rows)) for part in self.packed)
        ring = self.pools.ring
        return {
            "A_log": self.A_log,
            "a": a,
            "dt_bias": self.dt_bias,
            "q": q,
            "k": k,
            "v": v,
            "b": b,
            "initial_state_source": self.pools.state,
            "initial_state_indices": self.indices,
            "k_cache": ring.k,
            "u_cache": ring.u,
            "g_cache": ring.cum_log_decay,
            "hist_len": self.hist_len,
        } | changes

    def run(self, **changes: object) -> Tensor:
        if self.is_flat:
            return flashinfer.gated_delta_rule_mtp_ucache(**self.arguments(**changes))
        changes = {"cache_base": self.cache_base} | changes
        return flashinfer.gated_delta_rule_mtp_ucache_flush(**self.arguments(**changes))

    def native(self, flush_min: int | None, **options: object) -> Tensor:
        """Run the slot-keyed op on the other pools."""
        is_fold = None
        if flush_min is not None:
            is_fold = ((self.hist_len >= flush_min) & (self.indices >= 0)).to(torch.int8)
        return gated_delta_rule.verify(
            *self.packed,
            self.tokens.A_log.to(self.device),
            self.tokens.dt_bias.to(self.device),
            self.expected.state,
            self.expected.ring,
            offsets([self.rows] * 3, self.device),
            self.indices,
            max_verify_tokens=self.rows,
            is_fold=is_fold,
            **options,
        ).unflatten(0, (3, self.rows))

    def assert_same(self, found: Tensor, expected: Tensor) -> None:
        """In every bit where both calls ran our kernel; up to rounding on a CPU."""
        (assert_same if self.device == "cpu" else assert_same_bits)(found, expected)

    def assert_same_pools(self) -> None:
        for mine, other in zip(self.pools.tensors(), self.expected.tensors(), strict=True):
            self.assert_same(mine, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", range(1, 9))
def test_flush_equals_the_slot_keyed_op(rows: int, device: str) -> None:
    call = Call(device, rows)
    expected = call.native(17 - rows)
    call.assert_same(call.run(), expected)
    call.assert_same_pools()
    folds = 13 + rows > 16
    # The padding row would be flushed if it had a slot: its cursors stay.
    assert call.hist_len.tolist() == [0 if folds else 13, 5, 15]
    assert call.cache_base.tolist() == [(30 + 13) % 32 if folds else 30, 9, 3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", range(1, 9))
def test_flat_rings_equal_the_op_and_never_touch_the_states(rows: int, device: str) -> None:
    call = Call(device, rows, is_flat=True)
    expected = call.native(None)
    call.assert_same(call.run(disable_state_update=bool(rows % 2)), expected)
    call.assert_same_pools()
    assert call.hist_len.tolist() == list(call.history)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_flat", [False, True], ids=["flush", "flat"])
def test_one_call_against_the_oracle(mode: str, is_flat: bool) -> None:
    """Outputs, appended rows at their places, and the states that were flushed."""
    call = Call(is_flat=is_flat, dtypes=MODES[mode])
    dtypes, pools, capacity = call.dtypes, call.expected, call.geometry.capacity
    out = call.run(**({} if is_flat else {"flush_min": 6}))
    for i, slot in enumerate(call.slots[:2]):
        k, u, cum = pools.window(slot)
        assert k.shape[0] == call.history[i]
        state = window_state(pools.state[slot], k, u, cum)
        rows = call.tokens.rows(4 * i, 4 * i + 4)
        y, new_u, _ = recurrence(rows, state)
        is_flushed = not is_flat and call.history[i] >= 6
        total = gates(rows)[0].cumsum(0) + (0.0 if is_flushed else cum[-1].double())
        places = [(call.starts[i] + call.history[i] + t) % capacity for t in range(4)]
        ring, compute = call.pools.ring, dtypes.compute
        assert_close(out[i], y, dtypes.rows, compute)
        assert_close(
            ring.k[slot][:, places].mT, prepared(rows.k).permute(1, 2, 0), dtypes.ring, compute
        )
        assert_close(ring.u[slot][:, places], new_u.transpose(0, 1), dtypes.ring, compute)
        assert_close(ring.cum_log_decay[slot][:, places], total.mT, dtypes.cum, compute)
        if is_flushed:
            assert_close(call.pools.state[slot], state, dtypes.state, compute)
        else:
            assert_same_bits(call.pools.state[slot], pools.state[slot])
    assert out[2].eq(0).all()


class Plan(NamedTuple):
    """A session's options and how many steps of how many rows it runs."""

    name: str
    options: dict
    rows: tuple[int, ...] = (4,)
    steps: int = 40
    device: str = "cpu"


PLANS = [
    Plan("restart", {}),
    Plan("caller", {"restarts": False}),
    Plan("early", {"flush_min": 5}),
    Plan("early-caller", {"flush_min": 1, "restarts": False}),
    Plan("ragged-T", {}, (1, 8, 3, 5, 2, 7, 6, 4)),
    *(Plan(mode, {"dtypes": MODES[mode]}) for mode in MODES if mode != "fp64"),
]


def run_session(session: FlashSession, plan: Plan) -> None:
    chance = random.Random(7)
    for step in range(plan.steps):
        rows = plan.rows[step % len(plan.rows)]
        batch = chance.sample([0, 1, 2, -1], k=chance.randint(1, 4))
        if step % 5 == 0:
            batch.append(-1)
        session.step(batch, rows, {r: chance.randint(0, rows) for r in batch if r >= 0})


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
@pytest.mark.parametrize("device", DEVICES)
def test_many_steps_equal_the_recurrence(plan: Plan, device: str) -> None:
    options = dict(plan.options)
    if device == "cuda":
        options.setdefault("dtypes", MODES["bf16"])
    session = FlashSession(device=device, **options)
    run_session(session, plan)
    assert session.coverage["flushed"] >= 6
    assert session.coverage["wrapped"] >= 6
    assert session.coverage["rejected"] >= 20


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3, 4, 8])
def test_many_steps_on_flat_rings(rows: int, device: str) -> None:
    mode = "fp64" if device == "cpu" else "bf16"
    session = FlashSession(MODES[mode], is_flat=True, device=device)
    chance = random.Random(rows)
    while max(session.hist_len) + rows <= 16:
        batch = chance.sample([0, 1, 2, -1], k=4)
        session.step(batch, rows, {r: chance.randint(r == 0, rows) for r in batch if r >= 0})
    assert max(session.hist_len) > 8


@pytest.mark.parametrize("fault", ["cursor", "acceptance", "state"])
def test_the_oracle_has_teeth(fault: str) -> None:
    session = FlashSession()
    session.step([0, 1, 2], 4, {0: 4, 1: 2, 2: 1})
    if fault == "cursor":
        session.base[1] += 1
    elif fault == "acceptance":
        session.hist_len[0] -= 1
    else:
        session.pools.state[5] *= 1.0 + 1e-9
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        session.step([2, 0, 1], 4, {0: 4, 1: 2, 2: 1})


@pytest.mark.parametrize("device", DEVICES)
def test_without_restart_the_cursors_stay_with_the_caller(device: str) -> None:
    call = Call(device)
    expected = call.native(5)
    found = call.run(flush_min=5, restart_hist_on_flush=False)
    call.assert_same(found, expected)
    call.assert_same_pools()
    assert call.hist_len.tolist() == list(call.history)
    assert call.cache_base.tolist() == list(call.starts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_flat", [False, True], ids=["flush", "flat"])
@pytest.mark.parametrize("form", ["dense", "strided", "transposed"])
def test_a_given_output_keeps_the_rows_of_padding(form: str, is_flat: bool, device: str) -> None:
    call = Call(device, is_flat=is_flat)
    shape = (3, 4, 4, 16)
    output = {
        "dense": torch.empty(shape),
        "strided": torch.empty(3, 6, 8, 16)[:, 1:5, ::2],
        "transposed": torch.empty(4, 3, 16, 4).transpose(0, 1).mT,
    }[form]
    output = output.to(device, call.dtypes.rows).fill_(torch.nan)
    output[2] = 7.0
    assert output.shape == shape
    expected = call.native(None if is_flat else 13)
    assert call.run(output=output) is output
    call.assert_same(output[:2], expected[:2])
    assert output[2].eq(7.0).all()
    call.assert_same_pools()


@pytest.mark.parametrize("device", DEVICES)
def test_defaults_of_indices_and_of_the_base(device: str) -> None:
    """No indices: slots 0, 1, 2; no base: windows start at row 0."""
    call = Call(device)
    generator = torch.Generator().manual_seed(1)
    for slot, history in enumerate((0, 13, 16)):
        call.pools.fill_slot(slot, 0, history, generator)
    for mine, other in zip(call.expected.tensors(), call.pools.tensors(), strict=True):
        mine.copy_(other)
    call.hist_len.copy_(torch.tensor([0, 13, 16]))
    call.indices.copy_(torch.arange(3))
    expected = call.native(13, scale=0.25, use_qk_l2norm=False)
    found = call.run(
        initial_state_indices=None, cache_base=None, restart_hist_on_flush=False, scale=0.25,
        use_qk_l2norm_in_kernel=False,
    )  # fmt: skip
    call.assert_same(found, expected)
    call.assert_same_pools()


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str) -> None:
    """Batch strides that are not T rows, slices of one projection, other last strides, int64."""
    expected = (call := Call(device)).native(13)
    for form in ("batch", "fused", "last"):
        call, wide = Call(device), {}
        for name in ("q", "k", "v", "a", "b"):
            rows = call.arguments()[name]
            if form == "batch":
                larger = rows.new_full((3, 9, *rows.shape[2:]), torch.nan)
                wide[name] = larger[:, 2:6]
            elif form == "fused":
                flat = rows.flatten(2)
                larger = rows.new_full((3, 4, flat.shape[2] + 24), torch.nan)
                wide[name] = larger[..., 8 : 8 + flat.shape[2]].view(rows.shape)
            else:
                larger = rows.new_full((*rows.shape, 2), torch.nan)
                wide[name] = larger[..., 1]
            wide[name].copy_(rows)
        wide["initial_state_indices"] = call.indices.long().repeat_interleave(2)[::2]
        call.assert_same(call.run(**wide), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_cursors_that_stay_may_be_strided(device: str) -> None:
    call = Call(device)
    expected = call.native(13)
    cursors = torch.stack((call.hist_len, call.cache_base), 1)
    found = call.run(hist_len=cursors[:, 0], cache_base=cursors[:, 1], restart_hist_on_flush=False)
    call.assert_same(found, expected)
    call.assert_same_pools()


def test_parameters_are_not_rounded_and_need_no_gradient() -> None:
    """A_log and dt_bias as an engine has them: fp32 module parameters beside bf16 rows."""
    call = Call(dtypes=MODES["bf16"])
    call.tokens.A_log.fill_(3.0 + 2.0**-9)  # bf16 has no digits for the fraction
    call.tokens.dt_bias.fill_(2.0**-9 - 2.0)
    rounded = call.tokens.A_log.to(BF16), call.tokens.dt_bias.to(BF16)
    assert rounded[0].ne(call.tokens.A_log).all() and rounded[1].ne(call.tokens.dt_bias).all()
    expected = gates(call.tokens.rows(4, 8))[0].cumsum(0)[-1] + call.expected.window(1)[2][-1]
    out = call.run(
        A_log=torch.nn.Parameter(call.tokens.A_log), dt_bias=torch.nn.Parameter(call.tokens.dt_bias)
    )
    assert not out.requires_grad
    stored = call.pools.ring.cum_log_decay[1][:, 9 + 5 + 3]
    torch.testing.assert_close(stored.double(), expected, rtol=1e-6, atol=0)
    call = Call(dtypes=MODES["bf16"])
    call.run(A_log=rounded[0], dt_bias=rounded[1])
    stored = call.pools.ring.cum_log_decay[1][:, 9 + 5 + 3]
    assert (stored.double() - expected).abs().min() > 1e-3 * expected.abs().max()


def test_an_empty_batch() -> None:
    call = Call()
    none = {name: call.arguments()[name][:0] for name in ("q", "k", "v", "a", "b", "hist_len")}
    found = call.run(**none, initial_state_indices=call.indices[:0], cache_base=call.cache_base[:0])
    assert found.shape == (0, 4, 4, 16)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cache_base": None}, "caller-owned cache_base"),
        ({"hist_len": torch.zeros(6, dtype=torch.int32)[::2]}, "contiguous"),
        ({"cache_base": torch.zeros(6, dtype=torch.int32)[::2]}, "contiguous"),
        ({"hist_len": torch.tensor([17, 0, 0])}, r"hist_len out of legal range \[0, 16\]"),
        ({"hist_len": torch.tensor([-1, 0, 0])}, "hist_len out of legal range"),
        ({"cache_base": torch.tensor([0, 32, 0])}, r"cache_base out of legal range \[0, 32\)"),
        ({"cache_base": torch.tensor([0, -1, 0])}, "cache_base out of legal range"),
        ({"flush_min": 0}, r"flush_min: 0 is out of range \[1, 13\] for T=4"),
        ({"flush_min": 14}, "flush_min: 14 is out of range"),
        ({"flush_min": "5"}, "flush_min: '5' is out of range"),
        ({"initial_state_indices": [5, 2, -1]}, "initial_state_indices: expected a tensor, got"),
    ],
)
@pytest.mark.parametrize("kind", [ValueError, AssertionError, flashinfer.CallerError])
def test_guards(changes: dict, text: str, kind: type[Exception]) -> None:
    call = Call()
    with pytest.raises(kind, match=text):
        call.run(**changes)
    call.assert_same_pools()
    assert call.hist_len.tolist() == list(call.history)


def test_guards_leave_the_caller_alone_who_moves_the_cursors() -> None:
    call = Call()
    changes = {"hist_len": call.hist_len.repeat_interleave(2)[::2], "cache_base": None}
    assert call.run(**changes, restart_hist_on_flush=False).shape == (3, 4, 4, 16)


def test_indices_may_lie_apart() -> None:
    """They are copied, also where the cursors are moved afterwards."""
    found = []
    for step in (1, 2):
        call = Call()
        indices = call.indices.repeat_interleave(step)[::step]
        out = call.run(initial_state_indices=indices, flush_min=5)
        found.append((out, call.hist_len, call.cache_base))
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


def test_flat_rings_guard_their_room_on_a_cpu() -> None:
    call = Call(is_flat=True)
    call.hist_len[2] = 99  # padding may hold anything
    call.run()
    call.hist_len[1] = 13
    with pytest.raises(ValueError, match=r"hist_len out of legal range \[0, 12\] for T=4"):
        call.run()


@pytest.mark.parametrize(
    "changes",
    [
        {"softplus_beta": 2.0},
        {"softplus_threshold": 1.0},
        {"output_state_indices": torch.zeros(3)},
        {"intermediate_states_buffer": torch.zeros(3)},
        {"accepted_steps": torch.zeros(3)},
        {"ssm_state_indices": torch.zeros(3)},
        {"disable_output": True},
        {"recovery_steps": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("is_flat", [False, True], ids=["flush", "flat"])
def test_unsupported_arguments_are_named(changes: dict, is_flat: bool) -> None:
    with pytest.raises(NotImplementedError, match=f"^{next(iter(changes))}: only"):
        Call(is_flat=is_flat).run(**changes)


def test_more_unsupported_arguments() -> None:
    for name in ("disable_state_update", "pdl_trigger"):
        with pytest.raises(NotImplementedError, match=f"^{name}: only False is supported"):
            Call().run(**{name: True})
    with pytest.raises(NotImplementedError, match="^use_pdl: only False is supported, got True"):
        Call(is_flat=True).run(use_pdl=True)
    with pytest.raises(NotImplementedError, match="q: T of 1 to 8 is supported, got T=9"):
        Call(rows=9).run()


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("q", lambda x: None, "q: expected a tensor, got NoneType"),
        ("q", lambda x: x[0], r"q: expected 4 dimensions, got shape \[4, 2, 32\]"),
        ("k", lambda x: x[:, :, :1], r"q: expected shape .* = \[3, 4, 1, 32\], got \[3, 4, 2, 32"),
        ("v", lambda x: None, "v: expected a tensor, got NoneType"),
        ("b", lambda x: x[:2], r"b: expected shape \[B, T, HV\] = \[3, 4, 4\], got \[2, 4, 4\]"),
        ("A_log", lambda x: x[:1], r"A_log: expected shape \[HV\] = \[4\], got \[1\]"),
        ("initial_state_source", lambda x: x.mT, "initial_state_source: expected shape"),
        ("initial_state_source", lambda x: None, "initial_state_source: expected a tensor"),
        ("initial_state_indices", lambda x: x[:2], r"initial_state_indices: .* \[3\], got \[2\]"),
        ("k_cache", lambda x: x[:, :, :16], "k_cache: expected 32 ring rows, got 16"),
        ("u_cache", lambda x: x[:, :, :16], r"u_cache: .* = \[7, 4, 32, 16\], got \[7, 4, 16, 16"),
        ("g_cache", lambda x: x.to(BF16), "g_cache: expected dtype float32, float64, got bfloat16"),
        ("hist_len", lambda x: x.long(), "hist_len: expected dtype int32, got int64"),
        ("hist_len", lambda x: x[:2], r"hist_len: expected shape .*, got \[2\]"),
        ("hist_len", lambda x: None, "hist_len: expected a tensor, got NoneType"),
        ("cache_base", lambda x: x.long(), "cache_base: expected dtype int32, got int64"),
        ("output", lambda x: torch.zeros(3, 4, 4, 8), r"output: .* = \[3, 4, 4, 16\], got \[3, 4"),
        ("k", lambda x: x.to(BF16), "k: expected dtype float32, got bfloat16"),
    ],
)
def test_wrong_calls_speak_of_flashinfer_s_arguments(name: str, change, text: str) -> None:
    call = Call()
    given = call.arguments(cache_base=call.cache_base, output=None)[name]
    with pytest.raises(flashinfer.CallerError, match=f"^{text}"):
        call.run(**{name: change(given)})
    call.assert_same_pools()


def captured(call: Call, **options: object) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Warm up on copies, then capture one call on the pools themselves."""
    warm = Call(call.device, call.rows, is_flat=call.is_flat)
    warm.run(**options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(**options)
    return graph, out


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["restart", "caller", "flat"])
def test_graph_replays_equal_eager_calls(kind: str) -> None:
    """Cursors, indices and rows change between replays."""
    is_flat = kind == "flat"
    options = {} if is_flat else {"restart_hist_on_flush": kind == "restart"}
    call, eager = Call("cuda", is_flat=is_flat), Call("cuda", is_flat=is_flat)
    graph, out = captured(call, **options)
    for history, slots in (
        ((5, 13, 9), (1, 4, -1)),
        ((12, 0, 3), (-1, 1, 4)),
        ((9, 2, 0), (4, -1, 1)),
    ):
        for one in (call, eager):
            lengths = [min(n, 12) for n in history] if is_flat else history
            one.hist_len.copy_(torch.tensor(lengths))
            one.indices.copy_(torch.tensor(slots))
            one.packed[0].mul_(1.5)
            for pool in one.pools.tensors()[:4]:
                pool.nan_to_num_(nan=0.01)
        graph.replay()
        assert_same_bits(out, eager.run(**options))
        for mine, other in zip(call.pools.tensors(), eager.pools.tensors(), strict=True):
            assert_same_bits(mine, other)
        assert call.hist_len.tolist() == eager.hist_len.tolist()
        assert call.cache_base.tolist() == eager.cache_base.tolist()


@pytest.mark.gpu
def test_ranges_are_not_checked_while_a_graph_is_captured() -> None:
    call = Call("cuda")
    graph, _ = captured(call)
    call.hist_len[1] = 17
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        call.run()
    with pytest.raises(ValueError, match="hist_len out of legal range"):
        call.run()
    call.hist_len[1] = 5
    graph.replay()
    assert call.hist_len.tolist() == [0, 5, 15]


@pytest.mark.gpu
def test_no_host_sync_where_the_caller_moves_the_cursors() -> None:
    call, flat = Call("cuda"), Call("cuda", is_flat=True)
    output = torch.zeros(3, 4, 4, 16, dtype=BF16, device="cuda")
    arguments = call.arguments(
        cache_base=call.cache_base, restart_hist_on_flush=False, output=output
    )
    flat_arguments = flat.arguments()
    with no_sync():
        flashinfer.gated_delta_rule_mtp_ucache_flush(**arguments)
        flashinfer.gated_delta_rule_mtp_ucache(**flat_arguments)
    assert output[0].ne(0).any() and output[2].eq(0).all()
