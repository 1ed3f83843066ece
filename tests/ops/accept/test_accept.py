"""Acceptance against its definition, on the CPU and in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.accept_cases import expected, random_case
from hybridspec.ops.accept import Taken, accept_rows
from hybridspec.ops.accept.naive import accept_one


@pytest.mark.parametrize("has_counts", [True, False])
def test_equals_the_definition(has_counts: bool) -> None:
    reasons, cuts = set(), 0
    for seed in range(300):
        case = random_case(seed, has_counts=has_counts)
        state, result = expected(case)
        found = accept_rows(case.chosen, **case.arguments, result=case.result())
        torch.testing.assert_close(found.packed, result.packed)
        torch.testing.assert_close(found.num_committed, result.num_committed)
        for mine, right in zip(case.state(), state, strict=True):
            assert torch.equal(mine, right)
        rows = [Taken.of(row) for row in found.packed.tolist()]
        reasons |= {row.done for row in rows}
        cuts += sum(len(row.tokens) <= row.num_accepted and row.num_rows > 0 for row in rows)
    assert reasons == {0, 1, 2, 3} and cuts > 20


def test_the_definition_by_hand() -> None:
    def never(position: int, token: int) -> bool:
        return False

    assert accept_one([5, 6, 7], [5, 6], 10, 99, never) == ([5, 6, 7], 2, 0)
    assert accept_one([5, 6, 7], [5, 9], 10, 99, never) == ([5, 6], 1, 0)
    assert accept_one([5, 6, 7], [5, 6], 10, 11, never) == ([5, 6], 2, 2)
    assert accept_one([5, -1, 7], [5, 6], 10, 99, never) == ([5], 1, 3)
    assert accept_one([5, 6, 7], [5, 6], 10, 99, lambda p, t: t == 6) == ([5, 6], 2, 1)
    assert accept_one([5, 6, 7], [5, 6], 10, 99, lambda p, t: p > 11) == ([5, 6, 7], 2, 1)
    assert accept_one([-1], [], 10, 99, never) == ([], 0, 3)


@pytest.mark.gpu
def test_kernel_on_a_gpu() -> None:
    from helpers.accept_cases import on_device

    for seed in range(200):
        case = random_case(seed, has_counts=seed % 2 == 0)
        state, result = expected(case)
        device = on_device(case, "cuda")
        found = accept_rows(device.chosen, **device.arguments)
        assert torch.equal(found.packed.cpu(), result.packed)
        assert torch.equal(found.num_committed.cpu(), result.num_committed)
        for mine, right in zip(device.state(), state, strict=True):
            assert torch.equal(mine[: right.shape[0]].cpu(), right)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("slots", torch.zeros(4), "slots: expected dtype int32"),
        ("cu_seqlens", torch.zeros(4, dtype=torch.int32), r"cu_seqlens: expected shape \[5\]"),
        ("end_bits", torch.zeros(5, 3, dtype=torch.int32), "end_bits: expected shape"),
        ("backend", "cuda", "backend: expected one of"),
    ],
)
def test_wrong_arguments_are_named(name: str, value: object, message: str) -> None:
    case = random_case(1)
    with pytest.raises((TypeError, ValueError), match=message):
        accept_rows(case.chosen, **{**case.arguments, name: value})
