"""The ops as torch.library sees them: schemas, fakes, and compiled callers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.gdn_cases import Case, Dtypes, Geometry, VerifyCall
from helpers.tolerances import assert_same
from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops
from hybridspec.ops._backends import always
from hybridspec.ops._library import Backend, Written, register
from hybridspec.ops.ring import RingView

F32, BF16 = torch.float32, torch.bfloat16
OPS = torch.ops.hybridspec
SMALL = Geometry(heads=1, value_heads=2, key_dim=4, value_dim=4, num_slots=4)


def clean_call(*, history: int = 14) -> VerifyCall:
    """Return a call without NaN, since opcheck compares runs with ==."""
    case = Case("library", (3, 2), (5, history), (30, 2), geometry=SMALL)
    call = VerifyCall(case.using(Dtypes(F32, F32, F32)))
    for pool in call.pools.tensors():
        pool.nan_to_num_()
    return call


def row_arguments(call: VerifyCall, out: Tensor) -> tuple:
    options = (0.5, True, 1.0)
    gates = (call.tokens.A_log, call.tokens.dt_bias, *options)
    return *call.inputs(), out, *gates, call.pools.state, None


def ring_arguments(call: VerifyCall) -> tuple:
    ring = call.pools.ring
    cursors = (ring.ring_start, ring.history_len, ring.max_window, ring.has_token_decay)
    return ring.k, ring.u, ring.cum_log_decay, *cursors


@pytest.mark.parametrize("has_folds", [False, True])
def test_verify_passes_opcheck(has_folds: bool) -> None:
    call = clean_call()
    out = torch.empty(5, 2, 4)
    arguments = (
        *row_arguments(call, out), *ring_arguments(call), call.cu_seqlens, call.slot_tensor,
        call.is_fold if has_folds else None, 3, None, False, -1, False, None, "auto",
    )  # fmt: skip
    torch.library.opcheck(OPS.gated_delta_rule_verify.default, arguments)


def test_prefill_passes_opcheck() -> None:
    call = clean_call()
    call.pools.ring.history_len.zero_()
    arguments = (
        *row_arguments(call, torch.empty(5, 2, 4)), *ring_arguments(call), call.cu_seqlens,
        call.slot_tensor, None, 3, None, False, -1, False, None, 64, "auto",
    )  # fmt: skip
    torch.library.opcheck(OPS.gated_delta_rule_prefill.default, arguments)


def test_ops_on_slots_pass_opcheck() -> None:
    call = clean_call()
    pools, ring, slots = call.pools, call.pools.ring, call.slot_tensor
    other = torch.tensor([0, -1], dtype=torch.int32)
    counts = torch.tensor([3, 2], dtype=torch.int32)
    state = (pools.state, None, *ring_arguments(call))
    cursors = (pools.seq_len, ring.ring_start, ring.history_len)
    checks = {
        "gated_delta_rule_fold": (*state, slots, call.is_fold, "auto"),
        "gated_delta_rule_materialize": (*state, slots, other, counts, "auto"),
        "ring_decide_folds": (*cursors[1:], slots, counts, call.is_fold, 16, "auto"),
        "ring_commit": (*cursors, slots, call.is_fold, counts, counts - 1, 32, "auto"),
        "ring_copy_slots": (slots, other, [pools.state, *cursors], "auto"),
        "ring_reset_slots": (slots, [pools.state, *cursors], "auto"),
    }
    for name, arguments in checks.items():
        torch.library.opcheck(getattr(OPS, name).default, arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_compiles_as_one_graph(backend: str) -> None:
    def step(rows: list[Tensor], call: VerifyCall, ring: RingView, counts: Tensor) -> Tensor:
        is_fold, pools = torch.zeros_like(call.is_fold), call.pools
        verified = counts.clone()
        ring_ops.decide_folds(ring.history_len, call.slot_tensor, verified, is_fold, max_window=16)
        out = gated_delta_rule.verify(
            *rows, call.tokens.A_log, call.tokens.dt_bias, pools.state, ring, call.cu_seqlens,
            call.slot_tensor, max_verify_tokens=3, is_fold=is_fold,
        )  # fmt: skip
        ring_ops.commit(
            pools.seq_len, ring.ring_start, ring.history_len, call.slot_tensor, is_fold, verified,
            counts - 1, ring_capacity=32,
        )  # fmt: skip
        return 2.0 * out

    counts = torch.tensor([3, 2], dtype=torch.int32)
    plain, compiled = clean_call(history=15), clean_call(history=15)
    graph = torch.compile(step, fullgraph=True, backend=backend)
    for has_grad in (True, False, False):
        with torch.set_grad_enabled(has_grad):
            expected = step(plain.inputs(), plain, plain.pools.ring, counts)
            actual = graph(compiled.inputs(), compiled, compiled.pools.ring, counts)
        assert_same(actual, expected)
        for one, other in zip(compiled.pools.tensors(), plain.pools.tensors(), strict=True):
            assert_same(one, other)
    assert compiled.pools.ring.history_len.tolist() == [0, 0, 3, 11]


def test_prefill_and_fold_compile_as_one_graph() -> None:
    def run(rows: list[Tensor], call: VerifyCall, ring: RingView) -> Tensor:
        call.pools.ring.history_len.zero_()
        out = gated_delta_rule.prefill(
            *rows, call.tokens.A_log, call.tokens.dt_bias, call.pools.state, ring, call.cu_seqlens,
            call.slot_tensor, max_seqlen=3,
        )  # fmt: skip
        gated_delta_rule.fold(call.pools.state, ring, call.slot_tensor, is_fold=call.is_fold)
        ring_ops.reset_slots([call.pools.state], call.slot_tensor[:1])
        return out

    plain, compiled = clean_call(), clean_call()
    expected = run(plain.inputs(), plain, plain.pools.ring)
    graph = torch.compile(run, fullgraph=True, backend="eager")
    assert_same(graph(compiled.inputs(), compiled, compiled.pools.ring), expected)
    assert_same(compiled.pools.state, plain.pools.state)


def test_fake_tensors_pass_through() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = clean_call()
    rows = (*call.inputs(), call.tokens.A_log, call.tokens.dt_bias, call.pools.state)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor
        ring = RingView(*(fake(tensor) for tensor in call.pools.ring[:5]))
        out = gated_delta_rule.verify(
            *(fake(part) for part in rows), ring, fake(call.cu_seqlens), fake(call.slot_tensor),
            max_verify_tokens=3,
        )  # fmt: skip
    assert out.shape == (5, 2, 4)


class Names(TorchDispatchMode):
    """Collects the names of the operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_op_meets_the_dispatcher_only_where_it_may_matter() -> None:
    def scale(x: Written[Tensor], factor: float) -> None:
        x.mul_(factor)

    scaled = register("test_only.scale", {"reference": Backend(always, scale)})
    x = torch.ones(3)
    with Names() as names:
        scaled(x, 2.0)
        with torch.no_grad():
            scaled(x, 2.0)
    assert names.seen == ["hybridspec.test_only_scale.default", "aten.mul_.Tensor"]
    assert x.tolist() == [4.0, 4.0, 4.0]
    torch.library.opcheck(OPS.test_only_scale.default, (x, 3.0, "auto"))


def test_an_op_computes_the_same_on_both_ways() -> None:
    one, other = clean_call(history=15), clean_call(history=15)
    expected = one.run()
    with torch.no_grad():
        assert_same(other.run(), expected)
    for tensor, same in zip(one.pools.tensors(), other.pools.tensors(), strict=True):
        assert_same(tensor, same)
