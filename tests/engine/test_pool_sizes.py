"""Pools on a CPU take what requests need, within the memory there is, and give it back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.tiny_checkpoints import TinyCheckpoint, build_tiny_checkpoint
from hybridspec import LLM, CapacityError, SamplingParams
from hybridspec.runtime import KvMemory, Pools
from hybridspec.runtime import slots as slots_module

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [list(range(i, i + 20)) for i in range(6)]


def held_bytes(pools: Pools) -> int:
    return pools.num_slots * pools.slot_bytes() + pools.num_pages * pools.page_bytes()


def tokens(llm: LLM) -> list[list[int]]:
    results = llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)
    return [result.outputs[0].token_ids for result in results]


def test_what_grew_is_given_back_when_nothing_runs(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny.folder, device="cpu")
    pools, allocator = llm._engine.pools, llm._engine.allocator
    start = held_bytes(pools)
    first = tokens(llm)
    assert held_bytes(pools) > 2 * start  # little enough to be kept
    monkeypatch.setattr(slots_module, "IDLE_BYTES", start // 4)
    longer = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    stream = llm.stream(prompt_token_ids=PROMPTS[0], sampling_params=longer)
    beginning = list(next(stream).token_ids)
    assert tokens(llm) == first  # the longer request is there all the time
    assert pools.num_slots == 8
    beginning += [token for step in stream for token in step.token_ids][:10]
    assert beginning == first[0][: len(beginning)]
    assert held_bytes(pools) <= start
    assert allocator.num_live == 0 and pools.num_slots == 1
    for memory in pools.of_kind(KvMemory):
        assert memory.k_pages.untyped_storage().nbytes() == memory.k_pages.nbytes
        assert memory.page_table is pools.page_table and memory.seq_len is pools.seq_len
    assert tokens(llm) == first


def test_pools_grow_no_further_than_the_memory(tiny: TinyCheckpoint) -> None:
    """The allocator would hand out more than the machine, or the container, has."""
    expected = tokens(LLM(tiny.folder, device="cpu"))
    llm = LLM(tiny.folder, device="cpu")
    pools, allocator = llm._engine.pools, llm._engine.allocator
    assert allocator.free_bytes is not None
    limit = held_bytes(pools) + 42 * pools.slot_bytes() // 10
    allocator.free_bytes = lambda: limit - held_bytes(pools)
    assert tokens(llm) == expected  # some of them wait
    assert pools.num_slots == 4 and held_bytes(pools) <= limit


def test_a_request_that_fits_no_memory_is_told(tiny: TinyCheckpoint) -> None:
    llm = LLM(tiny.folder, device="cpu")
    llm._engine.allocator.free_bytes = lambda: 0
    pages = llm._engine.pools.num_pages
    llm._engine.pools.shrink(1, 1)
    llm._engine.allocator.__post_init__()
    assert pages > 1
    params = SamplingParams(temperature=0, max_tokens=300)
    with pytest.raises(CapacityError, match="do not fit the memory; lower max_tokens"):
        llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=params)
    llm._engine.allocator.free_bytes = None
    llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=params)


def test_growth_is_estimated_at_its_peak(tiny: TinyCheckpoint) -> None:
    pools = LLM(tiny.folder, device="cpu")._engine.pools
    assert pools.growth_bytes(pools.num_slots, pools.num_pages) == 0
    before = held_bytes(pools)
    expected = pools.growth_bytes(5, 40)
    one_layer = max(
        sum(t.nbytes for t in (memory.k_pages, memory.v_pages))
        for memory in pools.of_kind(KvMemory)
    )
    pools.grow_slots(5).grow_pages(40)
    # A wider page table is not foreseen: 4 bytes a slot and page.
    assert held_bytes(pools) - before - 4 * 5 * 8 <= expected <= held_bytes(pools) + one_layer


def test_a_longest_context_that_nobody_uses_costs_nothing(tmp_path: Path) -> None:
    """A table of angles, or of pages, for 2^24 positions would take gigabytes."""
    folder = build_tiny_checkpoint(tmp_path).folder
    short = LLM(folder, device="cpu")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 1 << 24
    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(folder, device="cpu")
    assert llm.config.max_model_len == 1 << 24
    assert tokens(llm) == tokens(short)
    assert held_bytes(llm._engine.pools) < 2 * held_bytes(short._engine.pools)
    held = [value for value in vars(llm._engine.model.rotary).values() if torch.is_tensor(value)]
    assert sum(tensor.nbytes for tensor in held) < 1 << 16
