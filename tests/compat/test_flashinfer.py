"""FlashInfer's signatures over our ops: same meaning as the slot-keyed ops, same guards."""

from __future__ import annotations

import inspect

import pytest
import torch

from helpers.gdn_cases import Dtypes, Geometry, Pools, assert_same_bits, make_tokens, offsets
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
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F32, BF16 = torch.float32, torch.bfloat16


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


class Call:
    """Three requests, one of them padding, in FlashInfer's layout."""

    def __init__(self, device: str = "cpu", rows: int = 4, capacity: int = 32) -> None:
        dtypes = Dtypes(F32, F32, F32) if device == "cpu" else Dtypes(BF16, BF16, BF16)
        g = Geometry(2, 4, 32, 16, capacity=capacity, max_window=16 if capacity > 16 else 8)
        self.rows, self.device = rows, device
        generator = torch.Generator().manual_seed(rows)
        self.history = (13, 5, 0) if capacity > 16 else (7, 3, 0)
        self.starts = (30, 9, 0) if capacity > 16 else (0, 0, 0)
        self.slots = (4, 1, -1)
        self.pools, self.expected = (Pools.create(g, dtypes, device) for _ in range(2))
        for slot, start, history in zip(self.slots, self.starts, self.history, strict=True):
            if slot >= 0:
                self.pools.fill_slot(slot, start, history, generator)
        for mine, other in zip(self.pools.tensors(), self.expected.tensors(), strict=True):
            other.copy_(mine)
        self.tokens = make_tokens(g, 3 * rows, generator, dtypes.rows)
        self.packed = [part.to(device) for part in self.tokens.packed()]
        self.hist_len, self.cache_base, self.indices = (
            torch.tensor(values, dtype=torch.int32, device=device)
            for values in (self.history, self.starts, self.slots)
        )

    def arguments(self, **changes: object) -> dict:
        q, k, v, a, b = (part.unflatten(0, (3, self.rows)) for part in self.packed)
        ring = self.pools.ring
        return {
            "A_log": self.tokens.A_log.to(self.device),
            "a": a,
            "dt_bias": self.tokens.dt_bias.to(self.device),
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

    def flush(self, **changes: object) -> torch.Tensor:
        changes = {"cache_base": self.cache_base} | changes
        return flashinfer.gated_delta_rule_mtp_ucache_flush(**self.arguments(**changes))

    def native(self, flush_min: int | None) -> torch.Tensor:
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
        ).unflatten(0, (3, self.rows))

    def same_pools(self) -> None:
        for mine, other in zip(self.pools.tensors(), self.expected.tensors(), strict=True):
            assert_same_bits(mine, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", range(1, 9))
def test_flush_equals_the_slot_keyed_op(rows: int, device: str) -> None:
    call = Call(device, rows)
    expected = call.native(17 - rows)
    assert_same_bits(call.flush(), expected)
    call.same_pools()
    folds = 13 + rows > 16
    assert call.hist_len.tolist() == [0 if folds else 13, 5, 0]
    assert call.cache_base.tolist() == [(30 + 13) % 32 if folds else 30, 9, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_without_restart_the_cursors_stay_with_the_caller(device: str) -> None:
    call = Call(device)
    expected = call.native(5)
    found = call.flush(flush_min=5, restart_hist_on_flush=False)
    assert_same_bits(found, expected)
    call.same_pools()
    assert call.hist_len.tolist() == [13, 5, 0] and call.cache_base.tolist() == [30, 9, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_given_output_keeps_the_rows_of_padding(device: str) -> None:
    call = Call(device)
    output = torch.full_like(call.packed[2], 7.0).unflatten(0, (3, 4))
    expected = call.native(13)
    found = call.flush(output=output)
    assert found is output
    assert_same_bits(found[:2], expected[:2])
    assert (found[2] == 7.0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_defaults_of_cursors_and_indices(device: str) -> None:
    """No indices: slots 0, 1, 2; no cursors: empty windows at row 0."""
    call = Call(device)
    for pools in (call.pools, call.expected):
        pools.state.copy_(torch.randn(pools.state.shape, generator=torch.manual_seed(0)))
    call.hist_len.zero_()
    call.indices.copy_(torch.arange(3))
    for cursor in (call.expected.ring.ring_start, call.expected.ring.history_len):
        cursor.zero_()
    expected = call.native(None)
    changes = {"initial_state_indices": None, "hist_len": None, "cache_base": None}
    assert_same_bits(call.flush(restart_hist_on_flush=False, **changes), expected)
    for mine, other in zip(call.pools.tensors()[:4], call.expected.tensors()[:4], strict=True):
        assert_same_bits(mine, other)


@pytest.mark.parametrize("device", DEVICES)
def test_flat_rings_never_touch_the_pool(device: str) -> None:
    call = Call(device, capacity=16)
    state = call.pools.state.clone()
    expected = call.native(None)
    found = flashinfer.gated_delta_rule_mtp_ucache(**call.arguments())
    assert_same_bits(found, expected)
    call.same_pools()
    assert_same_bits(call.pools.state, state)


@pytest.mark.parametrize("device", DEVICES)
def test_batch_strides_that_are_not_rows_times_a_row(device: str) -> None:
    call = Call(device)
    expected = call.native(13)
    wide = {}
    for name in ("q", "k", "v", "a", "b"):
        rows = call.arguments()[name]
        larger = torch.full((3, 9, *rows.shape[2:]), torch.nan, dtype=rows.dtype, device=device)
        larger[:, 2:6] = rows
        wide[name] = larger[:, 2:6]
    assert_same_bits(call.flush(**wide), expected)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cache_base": None}, "caller-owned cache_base"),
        ({"hist_len": torch.zeros(6, dtype=torch.int32)[::2]}, "contiguous"),
        ({"hist_len": torch.tensor([17, 0, 0], dtype=torch.int32)}, "hist_len out of legal range"),
        ({"hist_len": torch.tensor([-1, 0, 0], dtype=torch.int32)}, "hist_len out of legal range"),
        (
            {"cache_base": torch.tensor([0, 32, 0], dtype=torch.int32)},
            "cache_base out of legal range",
        ),
    ],
)
@pytest.mark.parametrize("kind", [ValueError, AssertionError])
def test_guards(changes: dict, text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=text):
        Call().flush(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"softplus_beta": 2.0},
        {"softplus_threshold": 1.0},
        {"output_state_indices": torch.zeros(3)},
        {"intermediate_states_buffer": torch.zeros(3)},
        {"accepted_steps": torch.zeros(3)},
        {"ssm_state_indices": torch.zeros(3)},
        {"disable_state_update": True},
        {"disable_output": True},
        {"recovery_steps": 1},
        {"pdl_trigger": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_unsupported_arguments_are_named(changes: dict) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(changes))):
        Call().flush(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": None}, "q: expected a tensor"),
        ({"k_cache": torch.zeros(7, 2, 16, 32)}, "k_cache: expected 32 ring rows, got 16"),
        ({"output": torch.zeros(3, 4, 4, 8)}, "out: expected shape"),
    ],
)
def test_wrong_calls(changes: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Call().flush(**changes)


def test_more_than_eight_rows() -> None:
    with pytest.raises(ValueError, match=r"q: expected 1..8 rows per request, got 9"):
        Call(rows=9).flush()
