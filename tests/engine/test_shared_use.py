"""Several callers of one engine at once: threads, streams in turns, and callers that fail."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from typing import Any

import pytest

from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, CapacityError, SamplingParams, StepOutput
from hybridspec.engine.interrupts import interrupts_wait
from hybridspec.engine.request import Request
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
    with pytest.raises(
        RuntimeError, match="another caller's step failed: KeyboardInterrupt"
    ) as lost:
        list(ours)
    assert isinstance(lost.value.__cause__, KeyboardInterrupt)
    [again] = llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=sampled(0))
    assert again.outputs[0].token_ids == plain[0]


def test_a_failed_step_says_why_to_each_request_that_it_takes_along(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm._engine
    requests = [engine.make_request(ids, sampled(0, n=2)) for ids in PROMPTS]
    for request in requests[:3]:
        engine.submit(request)
    engine.step()
    error = MemoryError("no room for 7 rows")

    def broken(*args: object) -> None:
        engine.submit(requests[3])  # waits, so it goes on
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode", broken)
        with pytest.raises(MemoryError):
            engine.step()
    lost = [one for request in requests[:3] for one in request.continuations]
    assert len({id(one.failure) for one in lost}) == 6
    for one in lost:
        assert one.finish_reason == "abort" and one.failure.__cause__ is error
        assert "MemoryError('no room for 7 rows')" in str(one.failure)
    while engine.has_work:
        engine.step()
    assert [one.finish_reason for one in requests[3].continuations] == ["length"] * 2


def test_ctrl_c_harms_its_own_caller_only(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes in the middle of a step, while the main thread runs it."""
    theirs = llm.stream(prompt_token_ids=PROMPTS[1], sampling_params=sampled(1))
    tokens = list(next(theirs).token_ids)
    decode = llm._engine.runner.decode

    def interrupted(requests: list[Any]) -> None:
        signal.raise_signal(signal.SIGINT)
        decode(requests)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(llm._engine.runner, "decode", interrupted)
            llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=sampled(0))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert tokens + [token for step in theirs for token in step.token_ids] == plain[1]
    assert not llm._engine.has_work


def test_a_second_ctrl_c_comes_through_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = []
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            signal.raise_signal(signal.SIGINT)
            reached.append(2)
        with pytest.raises(KeyboardInterrupt) as both, interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("of the block")
        assert isinstance(both.value.__context__, ValueError)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert reached == [1]


def test_submitting_and_dropping_wait_for_no_step(llm: LLM, plain: list[list[int]]) -> None:
    engine = llm._engine
    with engine.lock:  # as if a step were running
        kept = engine.make_request(PROMPTS[0], sampled(0))
        dropped = engine.make_request(PROMPTS[1], sampled(1, n=3))
        engine.submit(kept)
        engine.submit(dropped)
        engine.drop(dropped.continuations)
        assert engine.has_work
    while engine.has_work:
        engine.step()
    assert kept.token_ids == plain[0]
    assert [one.finish_reason for one in dropped.continuations] == ["abort"] * 3
    assert not dropped.token_ids


def test_a_request_dropped_before_it_was_seen_never_runs(llm: LLM) -> None:
    engine = llm._engine
    request = engine.make_request(PROMPTS[0], sampled(0))
    engine.drop([request])
    engine.submit(request)
    engine.step()
    assert not engine.has_work and not request.token_ids


def test_an_asynchronous_stream(llm: LLM, plain: list[list[int]]) -> None:
    async def tokens(i: int) -> list[int]:
        steps = llm.astream(prompt_token_ids=PROMPTS[i], sampling_params=sampled(i))
        return [token async for step in steps for token in step.token_ids]

    async def left_early() -> None:
        async for _ in llm.astream(prompt_token_ids=PROMPTS[0], sampling_params=sampled(0)):
            break

    async def everything() -> list[list[int]]:
        late = asyncio.create_task(tokens(1))
        found = await asyncio.gather(*map(tokens, range(len(PROMPTS))))
        late.cancel()
        await left_early()
        return found

    assert asyncio.run(everything()) == plain
    with pytest.raises(ValueError, match="^prompt: expected at least one token"):
        llm.astream(prompt_token_ids=[[]])
    llm.generate(prompt_token_ids=[1], sampling_params=sampled(0))  # takes what was left
    assert not llm._engine.has_work and llm._engine.allocator.num_live == 0


def test_a_cancelled_task_that_is_kept_keeps_no_request(llm: LLM) -> None:
    async def endless() -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        async for _ in llm.astream(prompt_token_ids=PROMPTS[0], sampling_params=params):
            pass

    async def cancelled() -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(endless()) for _ in range(3)]
        while llm.counters().num_admitted < 3:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return tasks

    tasks = asyncio.run(cancelled())  # its end waits for the threads
    llm.generate(prompt_token_ids=[1], sampling_params=sampled(0))  # takes what was left
    assert all(task.cancelled() for task in tasks)
    assert llm.counters().num_running == llm.counters().slots_used == 0


def test_continuations_cost_no_square(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are made when asked for: one for each continuation at the end, none in steps."""
    made = []
    completion = Request._completion

    def spy(request: Request, at: int | None) -> Any:
        made.append(request.index)
        return completion(request, at)

    monkeypatch.setattr(Request, "_completion", spy)
    [result] = llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=sampled(0, n=40))
    assert made == list(range(40)) and len(result.outputs) == 40


def test_a_stream_collected_in_the_middle_of_a_step(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = llm.stream(prompt_token_ids=PROMPTS[1], sampling_params=sampled(1))
    next(abandoned)
    cycle: list[Any] = [abandoned]
    cycle.append(cycle)
    decode, num_running = llm._engine.runner.decode, []

    def collecting(requests: list[Any]) -> None:
        if not num_running:
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
    engine.submit(stranger)
    assert llm.generate("import os", params)[0].outputs[0].token_ids == right
    assert stranger.finish_reason == "abort"
    assert isinstance(stranger.failure, CapacityError)
    with pytest.raises(CapacityError, match=r"^prompt: 1028 tokens, .* do not fit the memory"):
        llm.generate(prompt_token_ids=large, sampling_params=params)
    assert llm.generate("import os", params)[0].outputs[0].token_ids == right
    assert not engine.has_work and engine.allocator.num_live == 0
    monkeypatch.undo()
    longer = llm.generate(prompt_token_ids=large, sampling_params=params)  # memory is there again
    assert len(longer[0].outputs[0].token_ids) == 12
