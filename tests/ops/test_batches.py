"""Numbers in a batch's tensors that no batch has, which a reference reads before it writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.attention_cases import make_attention_batch
from helpers.conv_cases import make_conv_batch
from helpers.gdn_cases import Case, VerifyCall
from hybridspec.ops import causal_conv1d, gated_delta_rule, paged_attention
from hybridspec.ops import ring as ring_ops

GDN = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "ring", "cu_seqlens", "slots")
CONV = ("x", "weight", "conv_ring", "seq_len", "cu_seqlens", "slots")
ATTENTION = ("q", "k", "v", "k_pages", "v_pages", "page_table", "seq_len", "cu_seqlens", "slots")
Call = tuple[Callable[..., Tensor], dict[str, Any]]


def gdn_arguments() -> dict[str, Any]:
    call = VerifyCall(Case("batches", (4, 1), (0, 0)))
    tokens, pools = call.tokens, call.pools
    values = (
        *call.inputs(), tokens.A_log, tokens.dt_bias, pools.state, pools.ring, call.cu_seqlens,
        call.slot_tensor,
    )  # fmt: skip
    return dict(zip(GDN, values, strict=True))


def conv_arguments() -> dict[str, Any]:
    batch = make_conv_batch([4, 1], [6, 0], [3, 1])
    return {name: getattr(batch, name) for name in CONV}


def attention_arguments() -> dict[str, Any]:
    batch = make_attention_batch([4, 1], [6, 0], [3, 1])
    return dict(zip(ATTENTION, batch.tensors, strict=True))


OPS: dict[str, Callable[[], Call]] = {
    "gated_delta_rule.verify": lambda: (
        gated_delta_rule.verify,
        {**gdn_arguments(), "max_verify_tokens": 4},
    ),
    "gated_delta_rule.prefill": lambda: (
        gated_delta_rule.prefill,
        {**gdn_arguments(), "max_seqlen": 4},
    ),
    "causal_conv1d.verify": lambda: (
        causal_conv1d.verify,
        {**conv_arguments(), "max_verify_tokens": 4},
    ),
    "causal_conv1d.prefill": lambda: (
        causal_conv1d.prefill,
        {**conv_arguments(), "max_seqlen": 4},
    ),
    "paged_attention.verify": lambda: (
        paged_attention.verify,
        {**attention_arguments(), "max_verify_tokens": 4},
    ),
    "paged_attention.prefill": lambda: (
        paged_attention.prefill,
        {**attention_arguments(), "max_seqlen": 4},
    ),
}


def tensors(arguments: dict[str, Any]) -> list[Tensor]:
    ring = arguments.get("ring")
    held = list(arguments.values())
    held += [] if ring is None else [*ring]
    return [value for value in held if isinstance(value, Tensor)]


def refused(op: Callable[..., Any], arguments: dict[str, Any], text: str) -> None:
    """Expect one line that names the argument, and every tensor as it was."""
    before = [tensor.clone() for tensor in tensors(arguments)]
    with pytest.raises(ValueError, match=text) as error:
        op(**arguments)
    assert "\n" not in str(error.value)
    for tensor, kept in zip(tensors(arguments), before, strict=True):
        torch.testing.assert_close(tensor, kept, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OPS)
def test_the_unchanged_call_works(name: str) -> None:
    op, arguments = OPS[name]()
    assert op(**arguments).shape[0] == 5


@pytest.mark.parametrize("name", OPS)
def test_slots_that_are_none(name: str) -> None:
    for wrong in ([99, 1], [3, 99], [2**31 - 1, 1]):
        op, arguments = OPS[name]()
        slots = torch.tensor(wrong, dtype=torch.int32)
        refused(op, arguments | {"slots": slots}, r"^slots: expected slots below \d+, got \[")


@pytest.mark.parametrize("name", OPS)
def test_a_slot_of_two_requests(name: str) -> None:
    op, arguments = OPS[name]()
    slots = torch.tensor([3, 3], dtype=torch.int32)
    refused(op, arguments | {"slots": slots}, r"^slots: expected no slot twice, got \[3, 3\]")
    arguments["cu_seqlens"] = torch.tensor([0, 4, 4], dtype=torch.int32)
    op(**arguments | {"slots": slots})  # a request without rows is as good as absent


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("bounds", [(0, 3, 6), (0, 5, 3), (-1, 3, 5), (3, 0, 5), (0, 6, 5)])
def test_bounds_that_are_no_rows(name: str, bounds: tuple[int, ...]) -> None:
    op, arguments = OPS[name]()
    wrong = torch.tensor(bounds, dtype=torch.int32)
    text = "^cu_seqlens: expected bounds that rise from 0 to at most 5, got"
    refused(op, arguments | {"cu_seqlens": wrong}, text)


def longest(name: str) -> str:
    return "max_seqlen" if name.endswith("prefill") else "max_verify_tokens"


@pytest.mark.parametrize("name", OPS)
def test_requests_longer_than_announced(name: str) -> None:
    op, arguments = OPS[name]()
    text = f"^{longest(name)}: expected at least the rows of the longest request, got 3 but"
    refused(op, arguments | {longest(name): 3}, text)


def apart(tensor: Tensor) -> Tensor:
    """The same numbers, every second element of a longer tensor."""
    return tensor.repeat_interleave(2)[::2]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("argument", ["slots", "cu_seqlens", "seq_len", "A_log", "dt_bias"])
def test_lists_whose_elements_lie_apart(name: str, argument: str) -> None:
    """Kernels read them side by side."""
    op, arguments = OPS[name]()
    if argument in arguments:
        wrong = {argument: apart(arguments[argument])}
        refused(op, arguments | wrong, f"^{argument}: expected a last stride of 1, got strides")


@pytest.mark.parametrize("name", ["gated_delta_rule.verify", "gated_delta_rule.prefill"])
def test_cursors_that_lie_apart(name: str) -> None:
    for field in ("ring_start", "history_len"):
        op, arguments = OPS[name]()
        ring = arguments["ring"]
        wrong = ring._replace(**{field: apart(getattr(ring, field))})
        refused(op, arguments | {"ring": wrong}, f"^ring.{field}: expected a last stride of 1")


@pytest.mark.parametrize("name", [name for name in OPS if "attention" not in name])
def test_outputs_whose_columns_lie_apart(name: str) -> None:
    op, arguments = OPS[name]()
    like = arguments["v" if "v" in arguments else "x"]
    out = like.mT.contiguous().mT
    refused(op, arguments | {"out": out}, "^out: expected a last stride of 1, got strides")


@pytest.mark.parametrize("name", OPS)
def test_options_of_another_kind(name: str) -> None:
    op, arguments = OPS[name]()
    wrong = {longest(name): ("an integer", ("4", 4.0, None)), "backend": ("a text", (None, 3))}
    if "conv" not in name:
        wrong["scale"] = ("a number", ("1", [1.0]))
    if "gated" in name:
        wrong["beta_scale"] = ("a number", ("2", None))
        wrong["use_qk_l2norm"] = ("True or False", (None, "yes"))
    for inference in (False, True):
        for argument, (kind, values) in wrong.items():
            for value in values:
                text = rf"^{argument}: expected {kind}, got {re.escape(repr(value))}$"
                with torch.inference_mode(inference), pytest.raises(TypeError, match=text):
                    op(**arguments | {argument: value})
    op(**arguments | {longest(name): torch.tensor(4)})  # what counts as an integer is one


def test_tensors_of_several_devices() -> None:
    """A kernel gets addresses: one of another device would end the process."""
    op, right = OPS["gated_delta_rule.verify"]()
    right["is_fold"] = torch.zeros(2, dtype=torch.int8)
    ring = right["ring"]
    fields = ring._asdict()
    moved = {k: v.to("meta") for k, v in fields.items() if isinstance(v, Tensor)}
    elsewhere = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in right.items()}
    elsewhere["ring"] = ring._replace(**moved)
    for name in [k for k, v in right.items() if isinstance(v, Tensor) and k != "v"]:
        text = f"^{name}: expected a tensor on meta like (v|slots), got one on cpu"
        refused(op, elsewhere | {name: right[name]}, text)
    for name, tensor in moved.items():
        wrong = elsewhere["ring"]._replace(**{name: fields[name]})
        assert tensor.device.type == "meta"
        text = f"^ring.{name}: expected a tensor on meta like v, got one on cpu"
        refused(op, elsewhere | {"ring": wrong}, text)


def test_prefill_checks_all_requests_first() -> None:
    """The second request has live rows; the first one's state stays."""
    op, arguments = OPS["gated_delta_rule.prefill"]()
    arguments["ring"].history_len[int(arguments["slots"][1])] = 2
    refused(op, arguments, "^ring.history_len: expected 0 in slot . before prefill, got 2")


@pytest.mark.parametrize("name", [name for name in OPS if "gated" not in name])
def test_negative_positions(name: str) -> None:
    op, arguments = OPS[name]()
    wrong = torch.full_like(arguments["seq_len"], -2)
    refused(op, arguments | {"seq_len": wrong}, "^seq_len: expected 0 or more in slot 3, got -2")


@pytest.mark.parametrize("name", [name for name in OPS if "gated" not in name])
def test_arguments_that_are_no_tensors(name: str) -> None:
    op, arguments = OPS[name]()
    for argument in [key for key, value in arguments.items() if isinstance(value, Tensor)]:
        for wrong in (None, 3.0, arguments[argument].tolist(), arguments[argument].numpy()):
            with pytest.raises(TypeError, match=f"^{argument}: expected a tensor"):
                op(**arguments | {argument: wrong})


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("ring_start", 32, r"^ring.ring_start: expected a row below 32 in slot \d, got 32"),
        ("ring_start", -1, r"^ring.ring_start: expected a row below 32 in slot \d, got -1"),
        ("history_len", -1, r"^ring.history_len: expected 0..28 live rows in slot \d, .* got -1"),
        ("history_len", 29, r"^ring.history_len: expected 0..28 live rows .* of 4 new .* got 29"),
    ],
)
def test_cursors_outside_the_ring(field: str, value: int, text: str) -> None:
    op, arguments = OPS["gated_delta_rule.verify"]()
    ring = arguments["ring"]
    wrong = torch.full_like(getattr(ring, field), value)
    ring = ring._replace(**{field: wrong})
    refused(op, arguments | {"ring": ring}, text)


def test_cursors_outside_the_ring_in_fold_and_materialize() -> None:
    arguments = gdn_arguments()
    state, ring, slots = (arguments[name] for name in ("state", "ring", "slots"))
    wrong = ring._replace(history_len=torch.full_like(ring.history_len, 33))
    marks, rows = torch.ones(2, dtype=torch.int8), torch.full((2,), 40, dtype=torch.int32)
    text = "^ring.history_len: expected 0..32 live rows"
    call = {"state": state, "ring": wrong, "slots": slots}
    refused(gated_delta_rule.fold, call | {"is_fold": marks}, text)
    moved = {"out_slots": slots, "num_rows": rows}
    refused(gated_delta_rule.materialize, call | moved, text)
    twice = torch.tensor([3, 3], dtype=torch.int32)
    text = r"slots: expected no slot twice, got \[3, 3\]"
    refused(gated_delta_rule.fold, call | {"ring": ring, "slots": twice, "is_fold": marks}, text)
    moved = {"out_slots": twice, "num_rows": rows, "ring": ring}
    refused(gated_delta_rule.materialize, call | moved, f"^out_{text}")
    outside = torch.tensor([0, 99], dtype=torch.int32)
    moved = {"out_slots": outside, "num_rows": rows, "ring": ring}
    refused(gated_delta_rule.materialize, call | moved, "^out_slots: expected slots below")


def test_slots_that_are_none_in_ops_on_slots() -> None:
    cursors = {
        name: torch.ones(7, dtype=torch.int32) for name in ("seq_len", "ring_start", "history_len")
    }
    outside, ones = torch.tensor([1, 7], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    marks = torch.ones(2, dtype=torch.int8)
    text = r"^slots: expected slots below 7, got \[1, 7\]"
    step = {"slots": outside, "is_fold": marks, "num_verify_tokens": ones}
    commit = {**cursors, **step, "num_committed": ones, "ring_capacity": 32}
    refused(ring_ops.commit, commit, text)
    history = {"history_len": cursors["history_len"], "max_window": 16}
    refused(ring_ops.decide_folds, step | history, text)
    pools = [torch.ones(7, 3)]
    refused(ring_ops.reset_slots, {"pools": pools, "slots": outside}, text)
    for name in ("src_slots", "dst_slots"):
        pair = {"src_slots": ones, "dst_slots": ones, name: outside}
        refused(ring_ops.copy_slots, {"pools": pools, **pair}, f"^{name}: expected slots")
    assert torch.equal(pools[0], torch.ones(7, 3))
    with pytest.raises(TypeError, match=r"^pools\[0\]: expected a tensor"):
        ring_ops.reset_slots([None], ones)
    for wrong in (pools[0], None):  # the rows of a tensor would pass for pools
        text = f"^pools: expected a list of tensors .*, got {type(wrong).__name__}"
        with pytest.raises(TypeError, match=text):
            ring_ops.reset_slots(wrong, ones)
        with pytest.raises(TypeError, match=text):
            ring_ops.copy_slots(wrong, ones, ones)
    assert torch.equal(pools[0], torch.ones(7, 3))
