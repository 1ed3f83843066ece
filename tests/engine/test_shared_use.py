"""Several callers of one engine at once: threads, streams in turns, and callers that fail."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, CapacityError, SamplingParams, StepOutput
from hybridspec.runtime import Pools

PROMPTS = [[5, 17], [3, 1, 4], [9] * 20, [8, 8, 2, 1]]


def sampled(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=25, **options)


@pytest.fixture
def llm(tiny: TinyCheckpoint) -> LLM:
    return LLM(tiny.folder, device="cpu")


@pytest.fixture(scope="module")
def plain(tiny: TinyCheckpoint) -> list[list[int]]:
    alone = LLM(tiny.folder, draft_tokens=0, device="cpu")
    return [
        alone.generate(prompt_token_ids=ids, sampling_params=sampled(i))[0].outputs[0].token_ids
        for i, ids in enumerate(PROMPTS)
    ]


def test_threads(llm: LLM, plain: list[list[int]]) -> None:
    found: dict[int, Any] = {}

    def work(name: int) -> None:
        i = name % len(PROMPTS)
        try:
            if name % 2:
                found[name] = [
                    token
                    for step in llm.stream(prompt_token_ids=PROMPTS[i], sampling_params=sampled(i))
                    for token in step.token_ids
                ]
            else:
                [result] = llm.generate(prompt_token_ids=PROMPTS[i], sampling_params=sampled(i))
                found[name] = result.outputs[0].token_ids
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=work, args=(name,)) for name in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: plain[name % len(PROMPTS)] for name in range(12)}
    assert not llm._engine.has_work


def test_no_step_of_a_continuation_is_lost_to_another_stream(llm: LLM) -> None:
    """Another stream's turn may finish a continuation whose steps were just handed out."""
    options = {"prompt_token_ids": PROMPTS[0], "sampling_params": sampled(7, n=3)}
    streams = [llm.stream(**options), llm.stream(**options)]
    seen: list[list[StepOutput]] = [[], []]
    turns = [0, 1, 1, 1]
    live = {0, 1}
    while live:
        for i in turns:
            step = next(streams[i], None) if i in live else None
            if step is None:
                live.discard(i)
            else:
                seen[i].append(step)
    for steps in seen:
        for one in steps[-1].output.outputs:
            mine = [token for step in steps if step.index == one.index for token in step.token_ids]
            assert mine == one.token_ids


def test_a_request_lost_to_another_callers_failure_says_so(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise KeyboardInterrupt

    ours = llm.stream(prompt_token_ids=PROMPTS[0], sampling_params=sampled(0))
    theirs = llm.stream(prompt_token_ids=PROMPTS[1], sampling_params=sampled(1))
    next(ours)
    next(theirs)
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.runner, "decode", broken)
        with pytest.raises(KeyboardInterrupt):
            list(theirs)
    with pytest.raises(RuntimeError, match="another caller's step failed"):
        list(ours)
    [again] = llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=sampled(0))
    assert again.outputs[0].token_ids == plain[0]


def test_a_stream_collected_in_the_middle_of_a_step(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = llm.stream(prompt_token_ids=PROMPTS[1], sampling_params=sampled(1))
    next(abandoned)
    cycle: list[Any] = [abandoned]
    cycle.append(cycle)
    decode, num_running = llm._engine.runner.decode, []

    def collecting(requests: list[Any]) -> None:
        gc.collect()
        num_running.append(len(requests))
        decode(requests)

    monkeypatch.setattr(llm._engine.runner, "decode", collecting)
    del abandoned, cycle
    [result] = llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=sampled(0))
    assert result.outputs[0].token_ids == plain[0]
    assert num_running[0] == 2
    assert num_running[-1] == 1
    assert not llm._engine.has_work


def limited(monkeypatch: pytest.MonkeyPatch, most_slots: int, most_pages: int) -> None:
    """Let pools of more slots or pages fail to be allocated, as torch does on a CPU."""
    for name, most in (("grow_slots", most_slots), ("grow_pages", most_pages)):
        real = getattr(Pools, name)

        def grow(pools: Pools, size: int, real: Any = real, most: int = most) -> Pools:
            if size > most:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 99 bytes")
            return real(pools, size)

        monkeypatch.setattr(Pools, name, grow)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_requests_wait_for_memory(
    tiny: TinyCheckpoint,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    """Two fit at once, though pools would have been doubled; the others wait."""
    llm = LLM(tiny.folder, device="cpu", kv_layout=layout, max_model_len=60)
    limited(monkeypatch, most_slots=3, most_pages=2)
    params = [sampled(i) for i in range(len(PROMPTS))]
    for _ in range(2):
        results = llm.generate(prompt_token_ids=PROMPTS, sampling_params=params)
        assert [result.outputs[0].token_ids for result in results] == plain
    assert llm._engine.pools.num_pages == 2
    assert llm._engine.allocator.num_live == 0


def test_a_request_that_never_fits_is_its_callers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the step that finds it out goes on."""
    llm = LLM("bundled", device="cpu")
    engine = llm._engine
    params = SamplingParams(temperature=0, max_tokens=12)
    right = llm.generate("import os", params)[0].outputs[0].token_ids
    limited(monkeypatch, most_slots=8, most_pages=engine.pools.num_pages)
    large = [3] * (engine.pools.num_pages * engine.pools.page_size)
    stranger = engine.make_request(large, params)
    engine.add(stranger)
    assert llm.generate("import os", params)[0].outputs[0].token_ids == right
    assert stranger.finish_reason == "abort"
    assert isinstance(stranger.failure, CapacityError)
    with pytest.raises(CapacityError, match=r"^prompt: 1036 tokens, .* do not fit the memory"):
        llm.generate(prompt_token_ids=large, sampling_params=params)
    assert llm.generate("import os", params)[0].outputs[0].token_ids == right
    assert not engine.has_work and engine.allocator.num_live == 0
    monkeypatch.undo()
    longer = llm.generate(prompt_token_ids=large, sampling_params=params)  # memory is there again
    assert len(longer[0].outputs[0].token_ids) == 12
