"""What a step touches: no clone of a state, no other slot, nothing that a dead row says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.drafters import random_script, run, scripted_engine
from helpers.tiny_checkpoints import TinyCheckpoint, build_tiny_checkpoint
from hybridspec import LLM, SamplingParams
from hybridspec.runtime import GdnMemory, KvMemory, Pools
from hybridspec.runtime import pools as pools_module
from hybridspec.runtime import slots as slots_module

PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
PROMPT = list(range(20))


class LargestResult(TorchDispatchMode):
    """Records the largest tensor that any operation allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return result


def states(pools: Pools) -> list[torch.Tensor]:
    return [pool.state.clone() for pool in pools.of_kind(GdnMemory)]


@pytest.mark.parametrize("k", [0, 3])
def test_steps_that_do_not_fold_leave_states_alone(tmp_path: Path, k: int) -> None:
    """No state-sized tensor is made and the pool keeps every bit, unless the step folds."""
    # States larger than any activation, as in real models.
    build_tiny_checkpoint(tmp_path, linear_key_head_dim=128, linear_value_head_dim=128)
    engine = LLM(tmp_path, draft_tokens=k, device="cpu")._engine
    engine.pools.grow_slots(4)
    engine.allocator.__post_init__()
    for offset in range(3):
        engine.submit(engine.make_request([token + offset for token in PROMPT], PARAMS))
    engine.step()
    state_bytes = engine.pools.of_kind(GdnMemory)[0].state[0].nbytes
    kept = folded = 0
    while engine.has_work:
        running = list(engine.scheduler.running)
        before = states(engine.pools)
        with LargestResult() as watch:
            engine.step()
        is_fold = any(request.outbox[-1].is_fold for request in running)
        same = all(
            torch.equal(old, new) for old, new in zip(before, states(engine.pools), strict=True)
        )
        assert same != is_fold
        if not is_fold:
            assert 0 < watch.largest < state_bytes
            kept += 1
        folded += is_fold
    assert kept > 0 and folded > 0


def test_the_watch_sees_a_clone() -> None:
    """Teeth."""
    state = torch.zeros(4, 24, 16)
    with LargestResult() as watch:
        state[None].clone()
    assert watch.largest == state.nbytes


def test_poison_in_everything_dead(tiny: TinyCheckpoint) -> None:
    """NaN in unused slots, pages, ring rows and convolution rows changes no token."""
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=40) for i in range(6)]
    prompts = [list(range(i, i + 9 + 7 * i)) for i in range(6)]
    llm = LLM(tiny.folder, draft_tokens=0, device="cpu")
    plain = [
        llm.generate(prompt_token_ids=p, sampling_params=one)[0].outputs[0].token_ids
        for p, one in zip(prompts, params, strict=True)
    ]
    known = {tuple(p): tokens for p, tokens in zip(prompts, plain, strict=True)}
    engine = scripted_engine(tiny.folder, known, random_script(1), 4)
    pools = engine.pools
    pools.grow_slots(12)
    pools.grow_pages(40)
    engine.allocator.__post_init__()
    for pool in pools.of_kind(KvMemory):
        pool.k_pages.fill_(torch.nan)
        pool.v_pages.fill_(torch.nan)
    poisoned = []

    def poison() -> None:
        """Everything behind the cursors, and every slot that nobody holds."""
        live = {request.slot for request in engine.scheduler.running}
        capacity = pools.ring_capacity
        for slot in range(pools.num_slots):
            if slot not in live:
                for tensor in pools.slot_tensors()[3:]:
                    tensor[slot] = torch.nan
                continue
            start, count = int(pools.ring_start[slot]), int(pools.history_len[slot])
            dead = [(start + j) % capacity for j in range(count, capacity)]
            length = int(pools.seq_len[slot])
            conv_rows = pools.of_kind(GdnMemory)[0].conv_ring.shape[1]
            dead_conv = [(length + j) % conv_rows for j in range(conv_rows - 3)]
            for pool in pools.of_kind(GdnMemory):
                pool.ring.k[slot, :, dead] = torch.nan
                pool.ring.u[slot, :, dead] = torch.nan
                pool.ring.cum_log_decay[slot, :, dead] = torch.nan
                pool.conv_ring[slot, dead_conv] = torch.nan
            poisoned.append(slot)

    requests = [engine.make_request(p, one) for p, one in zip(prompts, params, strict=True)]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        poison()
    assert [request.token_ids for request in requests] == plain
    assert len(poisoned) > 20


def test_a_reused_slot_equals_a_fresh_one(tiny: TinyCheckpoint) -> None:
    engine = LLM(tiny.folder, draft_tokens=3, device="cpu")._engine
    first = run(engine, [PROMPT], [PARAMS])[0].token_ids
    run(engine, [PROMPT[::-1]], [PARAMS])
    again = run(engine, [PROMPT], [PARAMS])[0].token_ids
    assert engine.pools.num_slots == 1
    assert first == again


def test_results_do_not_share_buffers(tiny: TinyCheckpoint) -> None:
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    [first] = llm.generate(prompt_token_ids=PROMPT, sampling_params=PARAMS)
    kept = list(first.outputs[0].token_ids)
    llm.generate(prompt_token_ids=PROMPT[::-1], sampling_params=PARAMS)
    assert first.outputs[0].token_ids == kept


def test_pools_grow_with_use(tiny: TinyCheckpoint) -> None:
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    pools = llm._engine.pools
    assert pools.num_slots == 1
    prompts = [[token + i for token in PROMPT] for i in range(5)]
    together = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS)
    assert pools.num_slots == 8
    alone = [llm.generate(prompt_token_ids=p, sampling_params=PARAMS)[0] for p in prompts]
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]


@pytest.mark.parametrize("fails_at", [2, 6, 9, -1])
def test_growing_that_fails_changes_nothing(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """A request that is running goes on, and the next ones find pools that fit together."""
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    prompts = [[token + i for token in PROMPT] for i in range(3)]
    expected = tokens_of(llm, prompts)
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    running = llm.stream(prompt_token_ids=prompts[0], sampling_params=PARAMS)
    got = [*next(running).token_ids, *next(running).token_ids]
    resized, sizes = pools_module._resized, []
    num_tensors = 4 + 5 * len(llm._engine.pools.of_kind(GdnMemory))

    def failing(tensor: torch.Tensor, size: int, **options: int) -> torch.Tensor:
        if size > tensor.shape[0]:  # else it is taken back
            sizes.append(size)
        if len(sizes) == fails_at % num_tensors:
            sizes.clear()  # each request's growth fails at the same tensor
            raise RuntimeError("out of memory")
        return resized(tensor, size, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pools_module, "_resized", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS)
    pools = llm._engine.pools
    assert {tensor.shape[0] for tensor in pools.slot_tensors()} == {pools.num_slots} == {1}
    got += [token for step in running for token in step.token_ids]
    assert got == expected[0]
    assert tokens_of(llm, prompts) == expected


def test_an_interrupted_admission_loses_no_slot(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    allocator, pools = llm._engine.allocator, llm._engine.pools
    expected = tokens_of(llm, [PROMPT])

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(slots_module, "reset_slots", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompt_token_ids=[PROMPT], sampling_params=PARAMS)
    assert allocator.num_live == 0
    assert tokens_of(llm, [PROMPT]) == expected
    assert (pools.num_slots, pools.num_pages) == (1, pools.page_table.shape[1])
    assert sorted(allocator._free_pages) == list(range(pools.num_pages))


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    results = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS)
    return [result.outputs[0].token_ids for result in results]
