"""The adapter to FlashAttention-3 against the oracle, with a library of the same semantics."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.attention_cases import (
    AttentionBatch,
    expected_output,
    expected_pages,
    make_attention_batch,
)
from helpers.fake_fa3 import FakeFa3, fa3_build
from hybridspec.ops.paged_attention import Batch, Pages, Rows, fa3
from hybridspec.ops.verify_plan import Step, build_params

BATCHES = {
    "one row": ([1], [9], [2]),
    "start": ([1, 2, 3, 4], [0, 1, 2, 3], [5, 0, 3, 1]),
    "no rows first, middle and last": ([0, 3, 0, 8, 0], [4, 14, 3, 30, 16], [0, 1, 4, 2, 3]),
    "padding": ([2, 3, 1], [7, 0, 2], [-1, 3, -1]),
    "only padding": ([0, 2], [0, 0], [-1, -1]),
}


def batch_of(name: str, *, has_pages: bool = False, **options: object) -> AttentionBatch:
    lengths, positions, slots = BATCHES[name]
    if has_pages:
        return make_attention_batch(lengths, positions, slots, tail_rows=2, **options)
    batch = make_attention_batch(lengths, positions, slots, tail_rows=2, page_size=48, **options)
    return replace(batch, page_table=batch.page_table[:, :1])


def attend(batch: AttentionBatch, *, scale: float = 0.3, out: Tensor | None = None) -> Tensor:
    out = torch.full(batch.q.shape, math.nan, dtype=batch.q.dtype) if out is None else out
    fa3.verify(*batch.call(max(1, batch.longest), scale, out))
    return out


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("has_pages", [False, True], ids=["slot caches", "pages"])
def test_equals_the_oracle(name: str, has_pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, and every bit of the pages: what is not appended stays NaN."""
    fake = fa3_build(monkeypatch, "flash_attn_interface" if has_pages else "fa3_fwd_interface")
    batch = batch_of(name, has_pages=has_pages)
    right, (k_pages, v_pages) = expected_output(batch, scale=0.3), expected_pages(batch)
    torch.testing.assert_close(attend(batch), right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(batch.k_pages, k_pages, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(batch.v_pages, v_pages, rtol=0, atol=0, equal_nan=True)
    [call] = fake.calls
    assert (call["page_table"] is not None) == has_pages


def test_padding_has_no_row_of_the_page_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests get that of slot 0, of which no position is looked at."""
    fake = fa3_build(monkeypatch, "flash_attn_interface")
    batch = batch_of("padding", has_pages=True)
    attend(batch)
    [call] = fake.calls
    assert torch.equal(call["page_table"], batch.page_table[[0, 3, 0]])


@pytest.mark.parametrize("group", [(1, 1), (8, 1), (6, 3)], ids=str)
def test_head_groups(group: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    fa3_build(monkeypatch)
    batch = batch_of("start", num_query_heads=group[0], num_kv_heads=group[1])
    right = expected_output(batch, scale=0.3)
    torch.testing.assert_close(attend(batch), right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_pages", [False, True], ids=["slot caches", "pages"])
def test_integers_of_64_bits(has_pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fa3_build(monkeypatch)
    batch = batch_of("padding", has_pages=has_pages)
    names = ("page_table", "seq_len", "cu_seqlens", "slots")
    wide = replace(batch, **{name: getattr(batch, name).to(torch.int64) for name in names})
    torch.testing.assert_close(
        attend(wide), expected_output(batch, scale=0.3), rtol=1e-12, atol=1e-12
    )


def test_fresh_rows_are_rounded_to_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    fa3_build(monkeypatch)
    batch = batch_of("start", page_dtype=torch.float16)
    right = expected_output(batch, scale=0.3)
    torch.testing.assert_close(attend(batch), right, rtol=1e-12, atol=1e-12)


def test_no_rows_and_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fa3_build(monkeypatch)
    batch = make_attention_batch([], [], [], tail_rows=3, page_size=48)
    assert attend(replace(batch, page_table=batch.page_table[:, :1])).eq(0).all()
    batch = make_attention_batch([0], [5], [1], page_size=48)
    assert attend(replace(batch, page_table=batch.page_table[:, :1])).shape == (0, 4, 16)
    assert not fake.calls


def test_output_buffer_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    fa3_build(monkeypatch)
    batch = batch_of("padding")
    fused = torch.full((batch.q.shape[0], 4, 20), math.nan, dtype=torch.float64)
    attend(batch, out=fused[:, :, 2:18])
    right = expected_output(batch, scale=0.3)
    torch.testing.assert_close(fused[:, :, 2:18], right, rtol=1e-12, atol=1e-12)
    assert fused[:, :, :2].isnan().all() and fused[:, :, 18:].isnan().all()


def test_the_plan_of_a_step_feeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What verify_plan builds for a capacity above the live requests is taken as it is."""
    fa3_build(monkeypatch)
    lengths, positions, slots = [3, 0, 1, 0], [5, 0, 12, 0], [2, -1, 0, -1]
    batch = make_attention_batch(lengths, positions, slots, tail_rows=4, page_size=48)
    batch = replace(batch, page_table=batch.page_table[:, :1])
    plan = Step.create(max_requests=4, max_rows=8, max_drafts=3)
    plan.cu_seqlens.copy_(batch.cu_seqlens)
    history = torch.zeros_like(batch.seq_len)
    build_params(
        torch.zeros(4, 4, dtype=torch.int64), batch.slots, batch.seq_len, history, plan=plan
    )
    planned = replace(batch, cu_seqlens=plan.cu_seqlens, slots=plan.slots)
    right = expected_output(batch, scale=0.3)
    torch.testing.assert_close(attend(planned), right, rtol=1e-12, atol=1e-12)
    rows = fa3.append_rows(*planned.call(4, None, planned.q))
    assert rows.kv_len.tolist() == plan.kv_len.tolist() == [8, 0, 13, 0]


def test_the_oracle_has_teeth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that aligns the mask to the start is found out."""
    fake = fa3_build(monkeypatch)
    aligned = fake.flash_attn_with_kvcache

    def shifted(q: Tensor, *caches: Tensor, cache_seqlens: Tensor, **options: object) -> Tensor:
        return aligned(q, *caches, cache_seqlens=(cache_seqlens - 1).clamp(min=0), **options)

    monkeypatch.setattr(fake, "flash_attn_with_kvcache", shifted)
    batch = batch_of("start")
    assert not torch.allclose(attend(batch), expected_output(batch, scale=0.3), atol=1e-3)


BF16 = {"dtype": torch.bfloat16}
HOPPER, CPU = (9, 0), (0, 0)


def reason_for(
    monkeypatch: pytest.MonkeyPatch,
    *,
    capability: tuple[int, int] = HOPPER,
    head_dim: int = 128,
    max_pages: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Tensor,
) -> str | None:
    """Ask about a call on a device of this capability; no element of its tensors is read."""
    monkeypatch.setattr(fa3, "capability", lambda tensor: capability)
    pages = torch.zeros(3, 32, 2, head_dim, dtype=dtype)
    call = {
        "q": torch.zeros(4, 8, head_dim, dtype=dtype),
        "k": torch.zeros(4, 2, head_dim, dtype=dtype),
        "v": torch.zeros(4, 2, head_dim, dtype=dtype),
        "k_pages": pages,
        "v_pages": pages,
        "page_table": torch.zeros(3, max_pages, dtype=torch.int32),
        "seq_len": torch.zeros(3, dtype=torch.int32),
        "cu_seqlens": torch.zeros(2, dtype=torch.int32),
        "slots": torch.zeros(1, dtype=torch.int32),
        "out": torch.zeros(4, 8, head_dim, dtype=dtype),
    }
    mine = call | changes
    return fa3.explain(
        Rows(mine["q"], mine["k"], mine["v"], mine["out"], None),
        Pages(mine["k_pages"], mine["v_pages"], mine["page_table"], mine["seq_len"]),
        Batch(mine["cu_seqlens"], mine["slots"], 4),
    )


CALLS = {
    "cpu": ({"capability": CPU}, "the tensors are not on a CUDA device"),
    "ampere": ({"capability": (8, 0)}, "hardware sm_80: FlashAttention-3 is for sm_90"),
    "blackwell": ({"capability": (10, 0)}, "hardware sm_100: FlashAttention-3 is for sm_90"),
    "fp32": (
        {"dtype": torch.float32},
        "q has dtype float32; FlashAttention-3 takes bfloat16 and float16",
    ),
    "fp32 pages": (
        {"v_pages": torch.zeros(3, 32, 2, 128)},
        "v_pages has dtype float32, q has bfloat16",
    ),
    "device": (
        {"k_pages": torch.zeros(3, 32, 2, 128, device="meta", **BF16)},
        "k_pages is on meta, q is on cpu",
    ),
    "strides": (
        {"k_pages": torch.zeros(3, 32, 2, 132, **BF16)[..., :128]},
        "k_pages is not aligned to 16 bytes (strides (8448, 264, 132, 1))",
    ),
    "strides of values": (
        {"v_pages": torch.zeros(3, 32, 2, 132, **BF16)[..., :128]},
        "v_pages is not aligned to 16 bytes (strides (8448, 264, 132, 1))",
    ),
    "address": (
        {"q": torch.zeros(4, 8, 136, **BF16)[..., 4:132]},
        "q is not aligned to 16 bytes (strides (1088, 136, 1))",
    ),
    "page table": (
        {"max_pages": 2},
        "fa3_fwd_interface was built without page tables; it takes one page per slot",
    ),
    "fp16": ({"dtype": torch.float16}, "fa3_fwd_interface was built without float16"),
    "head size": ({"head_dim": 208}, "fa3_fwd_interface was built without head size 208"),
}


@pytest.mark.parametrize("name", CALLS)
def test_refuses_with_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fa3_build(monkeypatch, "fa3_fwd_interface", "PAGEDKV", "FP16", "HDIM256")
    changes, reason = CALLS[name]
    assert reason_for(monkeypatch) is None
    assert reason_for(monkeypatch, **changes) == reason


@pytest.mark.parametrize(
    "changes",
    [{"max_pages": 7}, {"dtype": torch.float16}, {"head_dim": 16}, {"head_dim": 256}],
    ids=str,
)
def test_a_full_build_serves(changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    fa3_build(monkeypatch, "flash_attn_interface")
    assert reason_for(monkeypatch, **changes) is None


def test_a_build_without_ragged_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    fa3_build(monkeypatch, "flash_attn_interface", "VARLEN")
    assert "flash_attn_interface was built without ragged" in reason_for(monkeypatch)


def test_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    fa3_build(monkeypatch)
    monkeypatch.setattr(fa3, "_BUILDS", (("no_such_module", "no_such_config"),))
    assert reason_for(monkeypatch) == (
        "not installed: neither fa3_fwd_interface (PyPI: fa3-fwd) nor flash_attn_interface can be "
        "found"
    )


def test_a_build_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fa3_build(monkeypatch)
    tmp_path.joinpath("broken_fa3.py").write_text("raise ImportError('undefined symbol: x\\ny')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fa3, "_BUILDS", (("broken_fa3", "no_such_config"),))
    assert reason_for(monkeypatch) == "broken_fa3 cannot be imported: undefined symbol: x"


def test_a_build_with_pages_is_taken_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are installed: each layout gets the first build that serves it."""
    fa3_build(monkeypatch, "fa3_fwd_interface", "PAGEDKV")
    first = fa3.installed_build()
    full = FakeFa3("flash_attn_interface")
    monkeypatch.setitem(sys.modules, full.__name__, full)
    builds = (("fa3_fwd_interface", "fa3_fwd_config"), (full.__name__, "no_such_config"))
    monkeypatch.setattr(fa3, "_BUILDS", builds)
    assert fa3.installed_build(False).name == first.name == "fa3_fwd_interface"
    assert fa3.installed_build(True).name == "flash_attn_interface"
