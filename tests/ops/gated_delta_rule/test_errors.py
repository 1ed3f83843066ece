"""Every wrong call says which argument is wrong, what came and what was expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers.gdn_cases import Case, VerifyCall, assert_same_bits
from hybridspec.ops import gated_delta_rule

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
ROWS = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "ring", "cu_seqlens", "slots")


def arguments() -> dict[str, object]:
    """Return a right call: 2 requests, 5 rows, H = 2, HV = 4, K = 16, V = 32, S = 7, R = 32."""
    call = VerifyCall(Case("errors", (3, 2), (0, 0)))
    values = (
        *call.inputs(), call.tokens.A_log, call.tokens.dt_bias, call.pools.state, call.pools.ring,
        call.cu_seqlens, call.slot_tensor,
    )  # fmt: skip
    return dict(zip(ROWS, values, strict=True))


def changed(name: str, change: Callable[[Tensor], object]) -> dict[str, object]:
    """Return the right call with one argument, or one field of the ring, changed."""
    call = arguments()
    if name.startswith("ring."):
        field = name.removeprefix("ring.")
        ring = call["ring"]
        call["ring"] = ring._replace(**{field: change(getattr(ring, field))})
    else:
        call[name] = change(call[name])
    return call


SHARED = [
    ("k", lambda x: x[:, 0], ValueError, r"k: expected shape \[N, H, K\] = \[N, H, K\], got"),
    ("q", lambda x: x[:4], ValueError, r"q: expected shape .* = \[5, 2, 16\], got \[4, 2, 16\]"),
    ("q", lambda x: None, TypeError, r"q: expected a tensor \[N H K\], got NoneType"),
    ("v", lambda x: x[:4], ValueError, r"v: expected shape .* = \[5, HV, V\], got \[4, 4, 32\]"),
    ("v", lambda x: x[:, :3], ValueError, "v: expected a multiple of k's 2 heads, got 3"),
    ("a", lambda x: x[:, :2], ValueError, r"a: expected shape .* = \[5, 4\], got \[5, 2\]"),
    ("b", lambda x: x[:3], ValueError, r"b: expected shape .* = \[5, 4\], got \[3, 4\]"),
    ("A_log", lambda x: x[:2], ValueError, r"A_log: expected shape .* = \[4\], got \[2\]"),
    ("dt_bias", lambda x: x[None], ValueError, r"dt_bias: expected shape .* = \[4\], got \[1, 4\]"),
    (
        "state",
        lambda x: x.mT,
        ValueError,
        r"state: expected shape \[S, HV, V, K\] = \[7, 4, 32, 16\], got \[7, 4, 16, 32\]",
    ),
    ("ring", lambda x: x.k, TypeError, "ring: expected a RingView, got Tensor"),
    ("ring.k", lambda x: x[:6], ValueError, r"ring.k: expected shape .* = \[7, 2, R, 16\], got"),
    ("ring.u", lambda x: x[:, :, :16], ValueError, r"ring.u: expected .* = \[7, 4, 32, 32\], got"),
    ("ring.cum_log_decay", lambda x: x[:, :1], ValueError, r"ring.cum_log_decay: expected shape"),
    ("ring.ring_start", lambda x: x[:3], ValueError, r"ring.ring_start: .* = \[7\], got \[3\]"),
    ("ring.history_len", lambda x: x[:3], ValueError, r"ring.history_len: .* = \[7\], got \[3\]"),
    ("ring.max_window", lambda x: 32, ValueError, r"ring.max_window: expected 1..31 .*, got 32"),
    ("ring.max_window", lambda x: 0, ValueError, r"ring.max_window: expected 1..31 .*, got 0"),
    ("cu_seqlens", lambda x: x[:2], ValueError, r"cu_seqlens: .* = \[3\], got \[2\]"),
    ("slots", lambda x: x[None], ValueError, r"slots: expected shape .*, got \[1, 2\]"),
    ("slots", lambda x: x[:, None], ValueError, r"slots: expected shape .*, got \[2, 1\]"),
    ("ring.max_window", lambda x: "16", TypeError, "ring.max_window: expected an integer, got"),
    ("v", lambda x: x.long(), TypeError, "v: expected dtype float32, bfloat16, .*, got int64"),
    ("q", lambda x: x.to(BF16), TypeError, "q: expected dtype float64, got bfloat16"),
    ("k", lambda x: x.to(F32), TypeError, "k: expected dtype float64, got float32"),
    ("a", lambda x: x.long(), TypeError, "a: expected dtype float32, .*, got int64"),
    ("b", lambda x: x.bool(), TypeError, "b: expected dtype float32, .*, got bool"),
    ("A_log", lambda x: x.int(), TypeError, "A_log: expected dtype float32, .* got int32"),
    ("dt_bias", lambda x: x.bool(), TypeError, "dt_bias: expected dtype float32, .*, got bool"),
    ("state", lambda x: x.int(), TypeError, "state: expected dtype float32, .*, got int32"),
    ("ring.k", lambda x: x.int(), TypeError, "ring.k: expected dtype float32, .*, got int32"),
    ("ring.u", lambda x: x.int(), TypeError, "ring.u: expected dtype float32, .*, got int32"),
    (
        "ring.cum_log_decay",
        lambda x: x.to(BF16),
        TypeError,
        "ring.cum_log_decay: expected dtype float32, float64, got bfloat16",
    ),
    ("ring.ring_start", lambda x: x.long(), TypeError, "ring.ring_start: expected dtype int32"),
    ("ring.history_len", lambda x: x.long(), TypeError, "ring.history_len: expected dtype int32"),
    ("cu_seqlens", lambda x: x.long(), TypeError, "cu_seqlens: expected dtype int32, got int64"),
    ("slots", lambda x: x.long(), TypeError, "slots: expected dtype int32, got int64"),
    *(
        (name, lambda x: x.mT.contiguous().mT, ValueError, f"{name}: expected a last stride of 1")
        for name in ("q", "k", "v", "a", "b", "state", "ring.k", "ring.u")
    ),
]  # fmt: skip


def test_the_call_is_right() -> None:
    gated_delta_rule.verify(**arguments(), max_verify_tokens=3)
    gated_delta_rule.prefill(**arguments(), max_seqlen=3)


@pytest.mark.parametrize(
    ("name", "change", "kind", "text"), SHARED, ids=[f"{i}-{x[0]}" for i, x in enumerate(SHARED)]
)
def test_wrong_arguments_of_verify_and_prefill(
    name: str, change: Callable, kind: type[Exception], text: str
) -> None:
    call = changed(name, change)
    state = arguments()["state"]
    with pytest.raises(kind, match=text):
        gated_delta_rule.verify(**call, max_verify_tokens=3)
    with pytest.raises(kind, match=text):
        gated_delta_rule.prefill(**call, max_seqlen=3)
    if name != "state":
        assert_same_bits(call["state"], state)


def test_ring_capacity_is_a_power_of_two() -> None:
    call = arguments()
    ring = call["ring"]
    call["ring"] = ring._replace(
        k=ring.k[:, :, :24], u=ring.u[:, :, :24], cum_log_decay=ring.cum_log_decay[:, :, :24]
    )
    with pytest.raises(
        ValueError, match="ring.k: expected a power of two as ring capacity, got 24"
    ):
        gated_delta_rule.verify(**call, max_verify_tokens=3)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"max_verify_tokens": 0}, ValueError, r"max_verify_tokens: expected 1..16 .*, got 0"),
        ({"max_verify_tokens": 17}, ValueError, r"max_verify_tokens: expected 1..16 .*, got 17"),
        ({"is_fold": torch.zeros(3, dtype=torch.int8)}, ValueError, r"is_fold: .* = \[2\], got"),
        ({"is_fold": torch.zeros(2)}, TypeError, "is_fold: expected dtype int8, got float32"),
        ({"is_fold": [0, 1]}, TypeError, r"is_fold: expected a tensor \[B\], got list"),
        (
            {"is_fold": torch.zeros(4, dtype=torch.int8)[::2]},
            ValueError,
            "is_fold: expected a last stride of 1",
        ),
        ({"out": torch.zeros(5, 4, 16)}, ValueError, r"out: .* = \[5, 4, 32\], got \[5, 4, 16\]"),
        ({"out": torch.zeros(5, 4, 32).int()}, TypeError, "out: expected dtype float32, .*, got"),
        ({"backend": "metal"}, ValueError, "backend: expected one of 'auto', .*, got 'metal'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_options_of_verify(options: dict, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        gated_delta_rule.verify(**arguments(), **({"max_verify_tokens": 3} | options))


def test_a_window_and_a_step_must_fit_in_the_ring() -> None:
    call = arguments()
    call["ring"] = call["ring"]._replace(max_window=30)
    text = "max_verify_tokens: a window of 30 rows and 3 more need 33 ring rows, got 32"
    with pytest.raises(ValueError, match=text):
        gated_delta_rule.verify(**call, max_verify_tokens=3)
    gated_delta_rule.verify(**{**call, "cu_seqlens": call["cu_seqlens"] * 0}, max_verify_tokens=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"chunk_size": 0}, "chunk_size: expected at least 1, got 0"),
        ({"max_seqlen": -1}, "max_seqlen: expected at least 0, got -1"),
        ({"backend": "metal"}, "backend: expected one of 'auto', .*, got 'metal'"),
    ],
)
def test_wrong_options_of_prefill(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        gated_delta_rule.prefill(**arguments(), **({"max_seqlen": 3} | options))


def pool_call() -> dict[str, object]:
    call = arguments()
    return {name: call[name] for name in ("state", "ring", "slots")}


def test_wrong_arguments_of_fold_and_materialize() -> None:
    ints, marks = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int8)
    right = pool_call()

    def both(kind: type[Exception], text: str, **wrong: object) -> None:
        with pytest.raises(kind, match=text):
            gated_delta_rule.fold(**(right | wrong), is_fold=marks)
        with pytest.raises(kind, match=text):
            gated_delta_rule.materialize(**(right | wrong), out_slots=ints, num_rows=ints)

    both(ValueError, r"state: expected shape \[S, HV, V, K\]", state=right["state"][0])
    both(TypeError, "state: expected dtype float32, .*, got int32", state=right["state"].int())
    both(ValueError, "state: expected a last stride of 1", state=right["state"].mT.contiguous().mT)
    both(ValueError, r"ring.k: expected shape .* = \[7, 2, 32, 8\]", state=right["state"][..., :8])
    both(TypeError, "ring: expected a RingView, got int", ring=3)
    both(TypeError, "slots: expected dtype int32, got int64", slots=right["slots"].long())
    both(ValueError, "backend: expected one of", backend="none")
    heads = right["ring"]._replace(
        u=right["ring"].u[:, :3],
        cum_log_decay=right["ring"].cum_log_decay[:, :3],
    )
    text = "state: expected a multiple of ring.k's 2 heads, got 3"
    both(ValueError, text, ring=heads, state=right["state"][:, :3])
    with pytest.raises(TypeError, match="is_fold: expected dtype int8, got int32"):
        gated_delta_rule.fold(**right, is_fold=ints)
    with pytest.raises(ValueError, match=r"num_rows: expected shape \[B\] = \[2\], got \[1\]"):
        gated_delta_rule.materialize(**right, out_slots=ints, num_rows=ints[:1])
    with pytest.raises(ValueError, match=r"out_slots: expected shape \[B\] = \[2\], got \[1\]"):
        gated_delta_rule.materialize(**right, out_slots=ints[:1], num_rows=ints)
