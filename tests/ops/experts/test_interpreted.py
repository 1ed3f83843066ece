"""The kernels against the definition in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.expert_cases import CASES, Case, MixCall, check_mix
from helpers.tolerances import assert_same
from hybridspec.ops.experts import cpu, explain_order, launch, order

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str) -> None:
    check_mix(MixCall(CASES[name], torch.float32), "triton")


def test_16_bits() -> None:
    check_mix(MixCall(CASES["odd sizes"], torch.float16), "triton")


@pytest.mark.parametrize("rows", [2, 9])
def test_lists_longer_than_a_program_looks_at(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer assignments than experts, and with more."""
    monkeypatch.setattr(launch, "_PAIRS", 4 * 16)
    check_mix(MixCall(Case(rows, 15, 5, 32, 16, 16), torch.float32), "triton")


def test_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which each product takes several, down to a part of one."""
    tile = launch.Tile(columns=16, inner=16, stages=2)
    config = launch.LaunchConfig(rows=16, gate_up=tile, down=tile)
    monkeypatch.setattr(launch, "choose_config", lambda *_: config)
    check_mix(MixCall(CASES["odd sizes"], torch.float32), "triton")
    check_mix(MixCall(CASES["many rows of few experts"], torch.float32), "triton")


def test_routes_as_the_reference() -> None:
    """Equal scores, zeros of both signs, infinities."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(9, 22, generator=generator).bfloat16().float()
    scores[0] = 0.0
    scores[1, ::2], scores[1, 1::2] = 0.0, -0.0
    scores[2] = scores[2].round()
    scores[3, 2:] = -torch.inf
    for is_normalized in (True, False):
        weights, experts = cpu.route(scores[:, :-1], 6, is_normalized)
        theirs, found = launch._route(scores, 6, is_normalized)
        assert torch.equal(theirs.long(), experts)
        torch.testing.assert_close(found[:, :-1], weights, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[:, -1], scores[:, -1].sigmoid(), rtol=1e-5, atol=1e-6)


def test_a_row_of_nan_spoils_no_other() -> None:
    call = MixCall(CASES["many rows of few experts"], torch.float32)
    right = call.run("triton")
    call.x[3], call.scores[3] = torch.nan, torch.nan
    out = call.run("triton")
    assert out[3].isnan().all()
    others = [row for row in range(len(out)) if row != 3]
    assert_same(out[others], right[others])


def test_what_they_refuse() -> None:
    call = MixCall(CASES["one row"], torch.float32)
    arguments = [*call.tensors(), call.out, 3, True]
    assert launch.explain(*arguments) is None
    columns = call.matrices._replace(down=call.matrices.down.mT.contiguous().mT)
    arguments[2] = columns
    assert launch.explain(*arguments) == "down has a last stride of 32"
    many = MixCall(Case(257, 2, 1, 16, 16, 16), torch.bfloat16)
    reason = launch.explain_few(*many.tensors(), many.out, 1, True)
    assert reason == "x has 257 rows, above 256 the grouped product is quicker"
    assert launch.explain(*many.tensors(), many.out, 1, True) is None


def test_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_COUNTS", (1, 4, 6))
    call = MixCall(Case(19, 3, 2, 16, 16, 16), torch.float32)
    assert explain_order(call.matrices) is None
    check_mix(call, "ordered")
