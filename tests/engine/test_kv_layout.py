"""Keys and values in pages or in one cache per slot, and which attention reads them."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.fake_fa3 import FakeFa3, fa3_build
from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, CapacityError, SamplingParams, UnsupportedError
from hybridspec.config import EngineConfig
from hybridspec.engine import memory, scheduler
from hybridspec.engine.resolve import Resolved, resolve
from hybridspec.ops.paged_attention import fa3
from hybridspec.runtime import KvMemory

LAYOUTS = ("paged", "contiguous")


def make_prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [
        [rng.randrange(97) for _ in range(rng.choice([1, 3, 20, 65, 90]))] for _ in range(count)
    ]


def make_params(count: int) -> list[SamplingParams]:
    """Greedy and sampled requests of many lengths."""
    return [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=40 - 3 * (i % 5))
        for i in range(count)
    ]


def tokens(llm: LLM, count: int = 8) -> list[list[int]]:
    results = llm.generate(prompt_token_ids=make_prompts(count), sampling_params=make_params(count))
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def plain(tiny: TinyCheckpoint) -> list[list[int]]:
    return tokens(LLM(tiny.folder, draft_tokens=0, device="cpu"))


@pytest.mark.parametrize("k", [0, 3, 7])
def test_tokens_do_not_depend_on_the_layout(
    tiny: TinyCheckpoint, plain: list[list[int]], k: int
) -> None:
    llm = LLM(tiny.folder, draft_tokens=k, device="cpu", kv_layout="contiguous", max_model_len=140)
    assert tokens(llm) == plain
    pools = llm._engine.pools
    assert (pools.page_size, pools.page_table.shape[1]) == (140, 1)
    assert pools.num_slots == pools.num_pages == 8  # both grew with use
    assert tokens(llm) == plain  # slots that were used before


def test_prompts_in_chunks_and_slots_in_turns(
    tiny: TinyCheckpoint, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scheduler.PROMPT_CHUNKS, "cpu", 16)
    for layout in LAYOUTS:
        llm = LLM(tiny.folder, device="cpu", kv_layout=layout)
        llm._engine.allocator.max_slots = 2
        assert tokens(llm) == plain
        assert llm.counters().num_slots == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_fills_its_context_to_the_end(tiny: TinyCheckpoint, layout: str) -> None:
    llm = LLM(tiny.folder, device="cpu", kv_layout=layout, max_model_len=67)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    [result] = llm.generate(prompt_token_ids=list(range(30)), sampling_params=params)
    longer = LLM(tiny.folder, device="cpu", draft_tokens=0)
    [right] = longer.generate(
        prompt_token_ids=list(range(30)), sampling_params=replace(params, max_tokens=37)
    )
    assert result.outputs[0].token_ids == right.outputs[0].token_ids


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeFa3:
    """FlashAttention-3 on a CPU and in fp32: the same semantics in plain PyTorch."""
    monkeypatch.setattr(fa3, "capability", lambda tensor: (9, 0))
    monkeypatch.setattr(fa3, "_explain_dtypes", lambda *pages: None)
    return fa3_build(monkeypatch, "fa3_fwd_interface", "PAGEDKV")


@pytest.mark.parametrize("k", [0, 3])
def test_tokens_do_not_depend_on_what_attends(
    tiny: TinyCheckpoint, plain: list[list[int]], library: FakeFa3, k: int
) -> None:
    llm = LLM(
        tiny.folder, draft_tokens=k, device="cpu", kv_layout="contiguous", attention_backend="fa3"
    )
    assert tokens(llm) == plain
    assert len(library.calls) > 20
    info = llm.describe()
    assert info.config.attention_backend == "fa3"
    assert info.backends["paged_attention"][0] == info.backends["attention of prompts"][0] == "fa3"


@torch.inference_mode()
def test_a_slot_does_not_see_what_was_left_in_its_cache(
    tiny: TinyCheckpoint, library: FakeFa3
) -> None:
    """The library would multiply NaN behind the last position by zero."""
    for backend in ("fa3", "reference"):
        llm = LLM(tiny.folder, device="cpu", kv_layout="contiguous", attention_backend=backend)
        allocator, pools = llm._engine.allocator, llm._engine.pools
        pools.grow_pages(3)
        for pool in pools.of_kind(KvMemory):
            pool.v_pages.fill_(torch.nan)
        slot = allocator.acquire(5)
        allocator.prepare([slot])
        page = int(pools.page_table[slot, 0])
        for pool in pools.of_kind(KvMemory):
            clean = pool.v_pages.eq(0).flatten(1).all(1)
            assert clean.tolist() == [backend == "fa3" and p == page for p in range(3)]


def test_what_serves_is_chosen_once_and_logged_once(
    tiny: TinyCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hybridspec"):
        llm = LLM(tiny.folder, device="cpu")
        tokens(llm, 2)
    lines = [line for line in caplog.messages if line.startswith("attention: ")]
    assert lines == ["attention: reference, prompts: reference"]
    assert llm.config.attention_backend == "reference"
    name, reason = llm.describe().backends["paged_attention"]
    assert name == "reference" and reason.startswith("plain PyTorch; not ")
    for other in ("triton", "fa3"):
        assert f"not {other}: the tensors are not on a CUDA device" in reason


@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_what_cannot_serve_is_refused_when_the_model_is_loaded(
    tiny: TinyCheckpoint, backend: str
) -> None:
    text = f"attention_backend: '{backend}' cannot serve this engine: the tensors are not on a CUDA"
    with pytest.raises(UnsupportedError, match=text):
        LLM(tiny.folder, device="cpu", attention_backend=backend)


def test_pages_are_refused_by_a_build_without_them(tiny: TinyCheckpoint, library: FakeFa3) -> None:
    with pytest.raises(UnsupportedError, match=r"page tables.*page size 64, 8 pages a slot"):
        LLM(tiny.folder, device="cpu", attention_backend="fa3")


def test_memory_of_a_request(tiny: TinyCheckpoint) -> None:
    paged, contiguous = (
        LLM(tiny.folder, device="cpu", kv_layout=layout, max_model_len=200).describe()
        for layout in LAYOUTS
    )
    assert paged.kv_bytes(7) == 7 * paged.kv_bytes_per_token
    assert contiguous.kv_bytes(7) == 200 * contiguous.kv_bytes_per_token
    assert contiguous.request_bytes == paged.request_bytes


GIB = 1 << 30


def resolved_on_gpu(tiny: TinyCheckpoint, **options: object) -> Resolved:
    """What would be decided for a GPU, where no kernel is asked whether it serves."""
    fixed = {"device": "cpu", "dtype": "bfloat16", "memory_fraction": 1.0, "max_num_seqs": 256}
    config = EngineConfig(**fixed, **options)
    return replace(resolve(tiny.folder, config), device=torch.device("cuda"))


def plan_on_gpu(
    resolved: Resolved, monkeypatch: pytest.MonkeyPatch, *, free: int
) -> memory.PoolPlan:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 4 * GIB))
    return memory.plan_pools(resolved)


@pytest.mark.parametrize("free", [1 << 21, 1 << 23, GIB], ids=["2 MiB", "8 MiB", "1 GiB"])
def test_slots_and_pages_fit_the_memory(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    for layout in LAYOUTS:
        resolved = resolved_on_gpu(tiny, kv_layout=layout, max_model_len=300)
        plan = plan_on_gpu(resolved, monkeypatch, free=free)
        slot = resolved.specs.request_bytes()
        page = resolved.page_size * resolved.specs.token_bytes()
        used = plan.num_slots * slot + plan.num_pages * page
        assert used <= free and plan.num_slots >= 1
        if layout == "paged":
            assert (resolved.page_size, resolved.max_pages_per_slot) == (64, 5)
            continue
        assert (resolved.page_size, resolved.max_pages_per_slot) == (300, 1)
        assert plan.num_slots == plan.num_pages
        assert used + slot + page > free or plan.num_slots == 256


def test_contexts_that_do_not_fit(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot of 512 tokens takes 0.25 MiB of keys and values more than one of short requests."""
    text = (
        r"max_model_len: with kv_layout 'contiguous' a request takes the memory of 512 tokens, "
        r"\d+ MiB, and there are 0 MiB; lower max_model_len, or take kv_layout 'paged'"
    )
    long = resolved_on_gpu(tiny, kv_layout="contiguous")
    free = long.specs.request_bytes() + (1 << 17)
    with pytest.raises(CapacityError, match=text):
        plan_on_gpu(long, monkeypatch, free=free)
    short = resolved_on_gpu(tiny, kv_layout="contiguous", max_model_len=64)
    plan_on_gpu(short, monkeypatch, free=free)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 18)
    with pytest.raises(CapacityError, match=text):
        LLM(tiny.folder, device="cpu", kv_layout="contiguous")
    LLM(tiny.folder, device="cpu")


def test_a_prompt_beyond_the_slot_is_refused(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    llm = LLM(tiny.folder, device="cpu", kv_layout="contiguous", max_model_len=40)
    with pytest.raises(ValueError, match="prompt: expected fewer tokens than the context of 40"):
        llm.generate(prompt_token_ids=list(range(40)))
