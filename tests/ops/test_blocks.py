"""Operators on blocks and on single tokens as torch.library sees them, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers.gdn_cases import Case, Dtypes, Geometry, VerifyCall
from hybridspec.ops import gated_delta_rule, ring

F32 = torch.float32
OPS = torch.ops.hybridspec
SMALL = Geometry(heads=1, value_heads=2, key_dim=4, value_dim=4, num_slots=4)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def verify_call() -> VerifyCall:
    """Return a call without NaN, since opcheck compares runs with ==."""
    call = VerifyCall(Case("blocks", (3, 2), (5, 14), (30, 2), geometry=SMALL))
    call = VerifyCall(call.case.using(Dtypes(F32, F32, F32)))
    for pool in call.pools.tensors():
        pool.nan_to_num_()
    return call


def token_arguments() -> dict[str, object]:
    """Return the arguments of `decode` for two requests, one of them padding."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    return {
        "q": normal(2, 1, 4), "k": normal(2, 1, 4), "v": normal(2, 2, 4), "a": normal(2, 2),
        "b": normal(2, 2), "A_log": normal(2), "dt_bias": normal(2), "state": normal(4, 2, 4, 4),
        "slots": ints(3, -1),
    }  # fmt: skip


def cursors() -> list[Tensor]:
    """Return ring_start, history_len and is_fold of four blocks."""
    return [ints(3, 30, 0, 7), ints(1, 9, 4, 12), ints(0, 1, 0, 1, dtype=torch.int8)]


def test_ops_pass_opcheck() -> None:
    call, options = verify_call(), (0.5, True, 1.0)
    view = call.pools.ring._replace(has_token_decay=True)
    marks = ints(0, 1, 1, 0, dtype=torch.int8)
    token = token_arguments()
    *rows, A_log, dt_bias, state, slots = token.values()
    blocks, counts = ints(1, 0, 3), ints(4, 2, 0)
    checks = {
        "gated_delta_rule_verify_blocks": (
            *call.inputs(), torch.empty(5, 2, 4), call.tokens.A_log, call.tokens.dt_bias, *options,
            call.pools.state, None, *view, call.cu_seqlens, call.slot_tensor, marks, 3, None,
            False, 0, True, None, "auto",
        ),
        "gated_delta_rule_decode": (
            *rows, torch.empty(2, 2, 4), A_log, dt_bias, *options, state, slots, -1, "auto",
        ),
        "ring_commit_blocks": (*cursors(), blocks, counts, 32, 8, 0, "auto"),
        "ring_reset_blocks": (*cursors(), blocks, counts, 8, 0, "auto"),
    }  # fmt: skip
    for name, arguments in checks.items():
        torch.library.opcheck(getattr(OPS, name).default, arguments)


WRONG_TOKENS = {
    "k": (lambda x: x[:1], ValueError, r"q: expected shape .* = \[1, 1, 4\]"),
    "q": (lambda x: x.half(), TypeError, "q: expected dtype float32, got float16"),
    "v": (lambda x: x[:, :0], ValueError, r"a: expected shape .* = \[2, 0\]"),
    "a": (lambda x: x.long(), TypeError, "a: expected dtype float32, .*, got int64"),
    "A_log": (lambda x: x[:1], ValueError, r"A_log: expected shape \[HV\] = \[2\], got \[1\]"),
    "state": (lambda x: x.mT, ValueError, "state: expected a last stride of 1"),
    "slots": (lambda x: x.long(), TypeError, "slots: expected dtype int32, got int64"),
    "scale": (lambda x: "1", TypeError, "scale: expected a number, got '1'"),
    "padding": (lambda x: -2, ValueError, "padding: expected at least -1, got -2"),
    "use_qk_l2norm": (lambda x: 1, TypeError, "use_qk_l2norm: expected True or False, got 1"),
    "backend": (lambda x: "cuda", ValueError, "backend: expected one of"),
}


@pytest.mark.parametrize(
    ("name", "change", "kind", "text"), [(n, *w) for n, w in WRONG_TOKENS.items()], ids=WRONG_TOKENS
)
def test_wrong_tokens(name: str, change: Callable, kind: type[Exception], text: str) -> None:
    call = token_arguments()
    gated_delta_rule.decode(**call)
    with pytest.raises(kind, match=text):
        gated_delta_rule.decode(**call | {name: change(call.get(name))})


def test_no_slot_twice() -> None:
    call = token_arguments() | {"slots": ints(3, 3)}
    with pytest.raises(ValueError, match="slots: expected no slot twice"):
        gated_delta_rule.decode(**call)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"ring_start": ints(1, 2)}, ValueError, r"history_len: .* = \[2\], got \[4\]"),
        ({"history_len": ints(1, 2, 3, 4, dtype=torch.int64)}, TypeError, "history_len: expected"),
        ({"is_fold": ints(1, 2, 3, 4)}, TypeError, "is_fold: expected dtype int8, got int32"),
        ({"num_committed": ints(1)}, ValueError, r"num_committed: .* = \[2\], got \[1\]"),
        ({"blocks": torch.zeros(2)}, TypeError, "blocks: expected dtype int32, int64, got float32"),
        ({"ring_capacity": 24}, ValueError, "ring_capacity: expected a power of two, got 24"),
        ({"padding": -2}, ValueError, "padding: expected at least -1, got -2"),
        ({"most_unmarked": 2.5}, TypeError, "most_unmarked: expected an integer, got 2.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_commits(changes: dict, kind: type[Exception], text: str) -> None:
    names = ("ring_start", "history_len", "is_fold")
    call = dict(zip(names, cursors(), strict=True)) | {
        "blocks": ints(1, 0), "num_committed": ints(2, 1), "ring_capacity": 32, "most_unmarked": 8,
    }  # fmt: skip
    ring.commit_blocks(**call)
    with pytest.raises(kind, match=text):
        ring.commit_blocks(**call | changes)
