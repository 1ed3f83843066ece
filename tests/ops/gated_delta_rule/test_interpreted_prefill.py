"""The kernels around the library in Triton's interpreter, the library itself in plain PyTorch."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from helpers.fake_fla import fake_chunk_gated_delta_rule
from helpers.gdn_cases import Dtypes, Geometry
from helpers.gdn_prompts import Prompts
from helpers.tolerances import KERNEL_FACTOR
from hybridspec.errors import UnsupportedError
from hybridspec.ops import gated_delta_rule
from hybridspec.ops.gated_delta_rule import fla

pytestmark = pytest.mark.interpreted

F32, F16 = torch.float32, torch.float16
DTYPES = Dtypes(F16, F32, F16)


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "library", lambda: fake_chunk_gated_delta_rule)
    monkeypatch.setattr(fla, "fixed_configurations", lambda target: nullcontext())


def check(prompts: Prompts, **options: object) -> torch.Tensor:
    return prompts.check(factor=KERNEL_FACTOR, backend="fla", **options)


@pytest.mark.parametrize("length", [1, 64, 65, 130])
def test_one_prompt(length: int) -> None:
    check(Prompts.create(length, dtypes=DTYPES))


def test_a_ragged_batch_with_padding() -> None:
    check(Prompts.create(5, 0, 70, 9, 64, slots=(2, 0, 5, -1, 6), dtypes=DTYPES), tail=3)


def test_only_padding() -> None:
    check(Prompts.create(4, slots=(-1,), dtypes=DTYPES), tail=2)


def test_many_prompts() -> None:
    geometry = Geometry(heads=1, value_heads=1, num_slots=40)
    lengths = [*((7 * i) % 20 for i in range(36)), 130]
    check(Prompts.create(*lengths, geometry=geometry, dtypes=DTYPES))


@pytest.mark.parametrize("state", [F32, F16, torch.int8], ids=str)
def test_states(state: torch.dtype) -> None:
    geometry = Geometry(key_dim=32)
    prompts = Prompts.create(70, 3, geometry=geometry, dtypes=Dtypes(F16, state, F16))
    check(prompts)


def test_odd_sizes_and_strided_pools() -> None:
    geometry = Geometry(heads=3, value_heads=9, key_dim=48, value_dim=80)
    check(Prompts.create(20, 7, geometry=geometry, dtypes=DTYPES, is_strided=True))


def test_options() -> None:
    check(Prompts.create(70, decay="medium", dtypes=DTYPES), scale=0.5, beta_scale=2.0)
    prompts = Prompts.create(12, dtypes=DTYPES)
    prompts.tokens.k.mul_(0.3)
    check(prompts, scale=0.5, use_qk_l2norm=False)


def test_slices_of_one_projection() -> None:
    prompts = Prompts.create(20, 3, dtypes=DTYPES)
    right = prompts.run(backend="reference")
    again = Prompts.create(20, 3, dtypes=DTYPES)
    call = again.call()
    rows = torch.cat([call[name].flatten(1) for name in ("q", "k", "v", "b", "a")], 1)
    q, k, v, b, a = rows.split((32, 32, 128, 4, 4), 1)
    slices = {"q": q.unflatten(1, (2, 16)), "k": k.unflatten(1, (2, 16))}
    slices |= {"v": v.unflatten(1, (4, 32)), "a": a, "b": b}
    out = torch.full((23, 4, 40), torch.nan, dtype=F16)[:, :, 4:-4]
    again.run(backend="fla", out=out, **slices)
    torch.testing.assert_close(out, right, rtol=2e-3, atol=2e-3)


def test_bounds_may_be_changed_in_place() -> None:
    prompts = Prompts.create(20, 3, dtypes=DTYPES)
    call = prompts.call() | {"backend": "fla"}
    gated_delta_rule.prefill(**call)
    call["cu_seqlens"][1] = 7
    found = gated_delta_rule.prefill(**call)
    again = Prompts.create(20, 3, dtypes=DTYPES)
    again.run(backend="reference")
    right = gated_delta_rule.prefill(
        **again.call() | {"cu_seqlens": call["cu_seqlens"], "backend": "reference"}
    )
    torch.testing.assert_close(found, right, rtol=4e-3, atol=4e-3)


def test_what_it_refuses() -> None:
    for prompts, options, reason in (
        (Prompts.create(5, dtypes=Dtypes(F32, F32, F32)), {}, "q has dtype float32; flash-linear"),
        (Prompts.create(5, dtypes=DTYPES), {"chunk_size": 32}, "chunk_size is 32"),
        (
            Prompts.create(5, dtypes=DTYPES, geometry=Geometry(key_dim=272)),
            {},
            "the key size is 272, flash-linear-attention takes up to 256",
        ),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            prompts.run(backend="fla", **options)


def test_the_oracle_would_see_chunks_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fla._list_chunks
    monkeypatch.setattr(fla, "_list_chunks", lambda *args: real(*args).flip(0))
    with pytest.raises(AssertionError):
        check(Prompts.create(130, dtypes=DTYPES))
