"""What belongs to a slot: all of it is listed, copied and kept when pools grow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.direct_runner import DirectRunner
from helpers.tiny_checkpoints import TinyCheckpoint, build_tiny_checkpoint
from hybridspec.models import load_model
from hybridspec.ops.ring import copy_slots
from hybridspec.runtime import GdnMemory, KvMemory, Pools

TOKENS = [(7 * i + i * i) % 97 for i in range(90)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor that an object holds, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def keyed_by_slot(pools: Pools) -> set[int]:
    held = [tensor for value in vars(pools).values() for tensor in tensors_in(value)]
    keyed = {id(tensor) for tensor in held if tensor.shape[0] == pools.num_slots}
    return keyed - {id(pools.page_table)}  # pages belong to a slot, but are not its memory


def steps(runner: DirectRunner, slots: list[int], first: int, count: int) -> list[Tensor]:
    """Run steps of 4 rows on slots that stand at `first`, 3 right and 1 rejected."""
    outputs = []
    for start in range(first, first + 3 * count, 3):
        rows = [*TOKENS[start : start + 3], 96 - TOKENS[start]]
        hidden = runner.verify(dict.fromkeys(slots, rows), [3] * len(slots))
        outputs.append(hidden.view(len(slots), 4, -1)[:, :3])
    return outputs


def tensors_of_slot(pools: Pools, slot: int) -> list[Tensor]:
    """What a slot holds, its pages' contents included; NaN, where nothing was written, as 0."""
    pages = pools.page_table[slot].long()
    stored = [
        part[pages] for pool in pools.of_kind(KvMemory) for part in (pool.k_pages, pool.v_pages)
    ]
    return [part.nan_to_num() for part in (*(t[slot] for t in pools.slot_tensors()), *stored)]


def copy_pages(pools: Pools, source: int, target: int) -> None:
    pages = pools.page_table.long()
    for pool in pools.of_kind(KvMemory):
        for tensor in (pool.k_pages, pool.v_pages):
            tensor[pages[target]] = tensor[pages[source]]


def test_all_that_is_keyed_by_slot_is_listed(checkpoint: TinyCheckpoint) -> None:
    pools = DirectRunner(load_model(checkpoint.folder), num_slots=5).pools
    for _ in range(2):
        listed = pools.slot_tensors()
        assert len({id(tensor) for tensor in listed}) == len(listed)
        assert {id(tensor) for tensor in listed} == keyed_by_slot(pools)
        assert len(listed) == 3 + 5 * len(pools.of_kind(GdnMemory))
        pools.grow_slots(9)


def test_a_copied_slot_decodes_like_its_source_and_a_fresh_one(checkpoint: TinyCheckpoint) -> None:
    model = load_model(checkpoint.folder)
    runner, fresh = DirectRunner(model), DirectRunner(model)
    runner.prefill({0: TOKENS[:9], 2: TOKENS[20:60]})
    steps(runner, [2], 60, 4)  # what the copy replaces
    steps(runner, [0], 9, 7)
    pools = runner.pools
    assert int(pools.ring_start[0]) > 0 and int(pools.history_len[0]) > 0
    with torch.inference_mode():
        copy_slots(pools.slot_tensors(), torch.tensor([0]).int(), torch.tensor([2]).int())
        copy_pages(pools, 0, 2)
    fresh.prefill({1: TOKENS[:30]})
    for together, alone in zip(
        steps(runner, [2, 0], 30, 12), steps(fresh, [1], 30, 12), strict=True
    ):
        for mine in together:
            torch.testing.assert_close(mine, alone[0], rtol=1e-4, atol=1e-4)
    for tensor in pools.slot_tensors()[:3]:
        assert tensor[0] == tensor[2]


def test_8_bit_states_and_their_factors(tmp_path: Path) -> None:
    """Factors are listed, counted, copied and kept; a copy has the same bits and decodes alike."""
    folder = build_tiny_checkpoint(tmp_path, linear_key_head_dim=64).folder
    model = load_model(folder)
    runner = DirectRunner(model, state_dtype=torch.int8)
    pools = runner.pools
    listed = pools.slot_tensors()
    assert {id(tensor) for tensor in listed} == keyed_by_slot(pools)
    assert len(listed) == 3 + 6 * len(pools.of_kind(GdnMemory))
    kept = sum(tensor[0].nbytes for tensor in (*listed, pools.page_table))
    assert pools.slot_bytes() == kept
    states = [(pool.state[0], pool.state_scale[0]) for pool in pools.of_kind(GdnMemory)]
    size = sum(state.nbytes + scale.nbytes for state, scale in states)
    wide = model.memory_specs(replace(pools.specs.options, state_dtype=torch.float32))
    assert pools.specs.state_bytes() == size == wide.state_bytes() * 17 / 64

    runner.prefill({0: TOKENS[:9], 2: TOKENS[20:60]})
    steps(runner, [0], 9, 7)
    assert int(pools.ring_start[0]) > 0  # it folded
    with torch.inference_mode():
        copy_slots(pools.slot_tensors(), torch.tensor([0]).int(), torch.tensor([2]).int())
        copy_pages(pools, 0, 2)
    pools.grow_slots(5)
    for pool in pools.of_kind(GdnMemory):
        assert torch.equal(pool.state[0], pool.state[2]) and pool.state[0].any()
        assert torch.equal(pool.state_scale[0], pool.state_scale[2])
    for together in steps(runner, [2, 0], 30, 3):
        torch.testing.assert_close(together[0], together[1], rtol=1e-4, atol=1e-4)
    assert int(pools.history_len[0]) == 15  # from here on it folds
    for together in steps(runner, [2, 0], 39, 9):
        # Rows of one product may be rounded differently, and numbers of a state then by a unit.
        torch.testing.assert_close(together[0], together[1], rtol=0, atol=0.5)


def test_growing_keeps_what_is_there(checkpoint: TinyCheckpoint) -> None:
    model = load_model(checkpoint.folder)
    grown, fixed = DirectRunner(model), DirectRunner(model)
    for runner in (grown, fixed):
        runner.prefill({1: TOKENS[:9]})
        steps(runner, [1], 9, 3)
    kept = [tensor.clone() for tensor in tensors_of_slot(grown.pools, 1)]
    grown.pools.grow_slots(8).grow_pages(64)
    for old, new in zip(kept, tensors_of_slot(grown.pools, 1), strict=True):
        assert torch.equal(old, new)
    for pool in grown.pools.of_kind(GdnMemory):
        assert pool.ring.ring_start is grown.pools.ring_start
        assert pool.ring.history_len is grown.pools.history_len
    for mine, other in zip(steps(grown, [1], 18, 8), steps(fixed, [1], 18, 8), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_token_ids_lie_beside_the_keys(checkpoint: TinyCheckpoint) -> None:
    """A page of ids for each page of keys, counted and grown with it."""
    pools = DirectRunner(load_model(checkpoint.folder)).pools
    [keys, *_] = pools.of_kind(KvMemory)
    assert pools.token_pages.shape == keys.k_pages.shape[:2]
    paged = [m for memory in pools.of_kind(KvMemory) for m in (memory.k_pages, memory.v_pages)]
    assert pools.page_bytes() == sum(t[0].nbytes for t in (*paged, pools.token_pages))
    pools.token_pages.copy_(torch.arange(pools.token_pages.numel()).view_as(pools.token_pages))
    old = pools.token_pages
    pools.grow_pages(64)
    assert pools.num_pages == pools.token_pages.shape[0] == 64
    assert torch.equal(pools.token_pages[: len(old)], old)


def test_memories_are_in_the_order_of_the_layers(checkpoint: TinyCheckpoint) -> None:
    model = load_model(checkpoint.folder)
    pools = DirectRunner(model).pools
    for _ in range(2):
        kinds = {"gdn": GdnMemory, "attention": KvMemory}
        assert [type(m) for m in pools.memories] == [kinds[k] for k in model.config.layer_kinds]
        assert isinstance(pools.head_memory, KvMemory)
        for memory in (*pools.memories, pools.head_memory):
            assert memory.seq_len is pools.seq_len
        pools.grow_slots(9).grow_pages(64)
    assert pools.memories[0].state.shape[0] == 9
    headless = Pools(
        model.memory_specs(pools.specs.options, has_head=False),
        num_slots=1,
        num_pages=1,
        page_size=16,
        max_pages_per_slot=1,
        device=torch.device("cpu"),
    )
    assert headless.head_memory is None
    assert len(headless.memories) == len(model.layers)
