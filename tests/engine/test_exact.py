"""Speculative output equals plain output token for token, whatever is drafted or batched."""

from __future__ import annotations

import random

import pytest
import torch

from helpers.drafters import (
    random_script,
    right_script,
    run,
    scripted_engine,
    wrong_script,
)
from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams
from hybridspec.engine import scheduler
from hybridspec.ops.ring import commit
from hybridspec.ops.verify_plan import Step
from hybridspec.speculate import Decoder
from hybridspec.speculate.plan import plan_rows

NUM_NEW = 40


def make_prompts(count: int, vocab: int = 97, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(vocab) for _ in range(rng.choice([1, 2, 3, 7, 20, 65]))]
        for _ in range(count)
    ]


def make_params(count: int) -> list[SamplingParams]:
    """Greedy and sampled requests with every kind of filter, mixed."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    ]
    return [
        SamplingParams(**kinds[i % 4], seed=1000 + i, max_tokens=NUM_NEW - 3 * (i % 5))
        for i in range(count)
    ]


def tokens_of(results: list) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def plain(tiny: TinyCheckpoint) -> list[list[int]]:
    """Plain decoding, each request alone."""
    llm = LLM(tiny.folder, draft_tokens=0, device="cpu")
    prompts, params = make_prompts(12), make_params(12)
    return [
        tokens_of(llm.generate(prompt_token_ids=p, sampling_params=one))[0]
        for p, one in zip(prompts, params, strict=True)
    ]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5, 6, 7])
def test_any_number_of_drafts(tiny: TinyCheckpoint, plain: list[list[int]], k: int) -> None:
    llm = LLM(tiny.folder, draft_tokens=k, device="cpu")
    results = llm.generate(prompt_token_ids=make_prompts(12), sampling_params=make_params(12))
    assert tokens_of(results) == plain
    if k:
        assert max(max(r.stats.drafted_per_step) for r in results) == k
    for result in results:
        committed = result.stats.committed_per_step
        assert sum(committed) + 1 == len(result.outputs[0].token_ids)
        assert all(
            1 <= c <= d + 1 for c, d in zip(committed, result.stats.drafted_per_step, strict=True)
        )


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_adversarial_drafters(
    tiny: TinyCheckpoint, plain: list[list[int]], kind: str, k: int
) -> None:
    prompts, params = make_prompts(12), make_params(12)
    known = {tuple(p): tokens for p, tokens in zip(prompts, plain, strict=True)}
    script = {"right": right_script, "wrong": wrong_script, "random": random_script(k)}[kind]
    requests = run(scripted_engine(tiny.folder, known, script, k), prompts, params)
    assert [request.token_ids for request in requests] == plain
    rates = [rate for r in requests for rate in r.stats.acceptance_by_position()]
    if kind == "right":
        assert set(rates) == {1.0}
    elif kind == "wrong":
        assert set(rates) == {0.0}
    else:
        assert 0.2 < sum(rates) / len(rates) < 0.9
    assert sum(request.stats.folds for request in requests) > 0


@pytest.mark.parametrize("verify_rows", [1, 14, 20, 33])
def test_rows_chosen_by_confidence(
    tiny: TinyCheckpoint, plain: list[list[int]], verify_rows: int
) -> None:
    """The head's own confidences choose; tokens stay the plain ones."""
    llm = LLM(tiny.folder, draft_tokens=5, device="cpu", verify_rows=verify_rows)
    results = llm.generate(prompt_token_ids=make_prompts(12), sampling_params=make_params(12))
    assert tokens_of(results) == plain
    counts = {count for r in results for count in r.stats.drafted_per_step}
    assert counts == {0} if verify_rows == 1 else len(counts) > 2


def test_rows_chosen_by_wild_confidences(tiny: TinyCheckpoint, plain: list[list[int]]) -> None:
    """NaN, infinite and negative confidences leave the plan valid and the tokens right."""
    prompts, params = make_prompts(12), make_params(12)
    known = {tuple(p): tokens for p, tokens in zip(prompts, plain, strict=True)}
    engine = scripted_engine(tiny.folder, known, random_script(3), 5, verify_rows=30)
    rng = random.Random(4)
    wild = [0.0, 1.0, 0.3, 0.99, float("nan"), float("inf"), -1.0]
    engine.runner.decoder.drafter.inner.confidence = lambda: rng.choice(wild)
    requests = run(engine, prompts, params)
    assert [request.token_ids for request in requests] == plain
    assert {n for r in requests for n in r.stats.drafted_per_step} == {0, 1, 2, 3, 4, 5}


def test_requests_that_join_and_leave(tiny: TinyCheckpoint, plain: list[list[int]]) -> None:
    prompts, params = make_prompts(12), make_params(12)
    known = {tuple(p): tokens for p, tokens in zip(prompts, plain, strict=True)}
    engine = scripted_engine(tiny.folder, known, random_script(5), 4)
    requests = [engine.make_request(p, one) for p, one in zip(prompts, params, strict=True)]
    doomed = [engine.make_request(p, one) for p, one in zip(prompts, params, strict=True)][:3]
    arrivals = iter([*requests[:4], *doomed, *requests[4:]])
    for arrived, request in enumerate(arrivals, start=1):
        engine.submit(request)
        for _ in range(1 + arrived % 2):
            engine.step()
        if arrived == 9:
            for one in doomed:
                engine.abort(one)
    while engine.has_work:
        engine.step()
    assert [request.token_ids for request in requests] == plain
    assert {request.finish_reason for request in doomed} == {"abort"}
    assert engine.allocator.num_live == 0


def test_chunked_prefill(
    tiny: TinyCheckpoint, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scheduler.PROMPT_CHUNKS, "cpu", 6)
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu", max_num_batched_tokens=13)
    results = llm.generate(prompt_token_ids=make_prompts(12), sampling_params=make_params(12))
    assert tokens_of(results) == plain


def test_requests_wait_when_the_pools_are_full(
    tiny: TinyCheckpoint, plain: list[list[int]]
) -> None:
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    allocator = llm._engine.allocator
    allocator.pools.grow_slots(3)
    allocator.__post_init__()
    allocator.can_grow = False
    peak = 0
    engine = llm._engine
    requests = [
        engine.make_request(p, one)
        for p, one in zip(make_prompts(12), make_params(12), strict=True)
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        peak = max(peak, allocator.num_live)
    assert [request.token_ids for request in requests] == plain
    assert peak == 3
    assert allocator.num_live == 0


def test_two_streams_at_once(tiny: TinyCheckpoint, plain: list[list[int]]) -> None:
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    prompts, params = make_prompts(2), make_params(2)
    streams = [
        llm.stream(sampling_params=one, prompt_token_ids=p)
        for p, one in zip(prompts, params, strict=True)
    ]
    collected: list[list[int]] = [[], []]
    while streams:
        for i, stream in enumerate(streams):
            output = next(stream, None)
            if output is not None:
                collected[i] += output.token_ids
            elif all(len(c) == len(plain[j]) for j, c in enumerate(collected)):
                streams = []
                break
    assert collected == plain[:2]


def test_a_closed_stream_leaves_nothing_behind(
    tiny: TinyCheckpoint, plain: list[list[int]]
) -> None:
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    stream = llm.stream(prompt_token_ids=make_prompts(1)[0], sampling_params=make_params(1)[0])
    next(stream)
    next(stream)
    stream.close()
    assert llm._engine.allocator.num_live == 0
    assert not llm._engine.has_work
    again = llm.generate(prompt_token_ids=make_prompts(12), sampling_params=make_params(12))
    assert tokens_of(again) == plain


def test_a_failing_step_frees_its_requests(
    tiny: TinyCheckpoint, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    model = llm._engine.model
    with monkeypatch.context() as patch:

        def broken(*args: object) -> None:
            raise RuntimeError("out of memory")

        patch.setattr(type(model), "logits", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.generate(prompt_token_ids=make_prompts(12), sampling_params=make_params(12))
    assert llm._engine.allocator.num_live == 0
    again = llm.generate(prompt_token_ids=make_prompts(12), sampling_params=make_params(12))
    assert tokens_of(again) == plain


def test_seeds(tiny: TinyCheckpoint) -> None:
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    prompt = make_prompts(1)[0]

    def tokens(seed: int | None) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=30)
        return tokens_of(llm.generate(prompt_token_ids=prompt, sampling_params=params))[0]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(None) != tokens(None)


def test_requests_admitted_together_fold_in_different_steps(tiny: TinyCheckpoint) -> None:
    """Eight equal requests with right drafts stay in step; an eighth to a half of them folds."""
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    prompts = [[7 + i, *range(20)] for i in range(8)]
    plain = LLM(tiny.folder, draft_tokens=0, device="cpu")
    expected = tokens_of(plain.generate(prompt_token_ids=prompts, sampling_params=params))
    known = {tuple(p): tokens for p, tokens in zip(prompts, expected, strict=True)}
    engine = scripted_engine(tiny.folder, known, right_script, 3)
    requests = [engine.make_request(prompt, params) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    assert [request.token_ids for request in requests] == expected
    folds = [[step.is_fold for step in request.outbox] for request in requests]
    per_step = [sum(marks) for marks in zip(*folds, strict=True)]
    assert max(per_step) <= 4
    assert sum(per_step) >= 8 * (80 // 16 - 1)
    assert all(step.history_len <= 16 for request in requests for step in request.outbox)


def verify_and_forget(decoder: Decoder, slots: list[int]) -> None:
    """Run the rows of a step, with the folds that are due, and commit none of them."""
    pools, most = decoder.pools, decoder.requests.most_drafts
    num_rows = len(slots) * (most + 1)
    step = Step.create(max_requests=len(slots), max_rows=num_rows, max_drafts=most)
    plan_rows(decoder, torch.tensor(slots, dtype=torch.int32), step, num_rows=num_rows)
    decoder.model.forward(step, pools.memories)
    commit(
        pools.seq_len, pools.ring_start, pools.history_len, step.slots, step.is_fold,
        step.num_verify_tokens, torch.zeros(len(slots), dtype=torch.int32),
        ring_capacity=pools.specs.options.ring_capacity,
    )  # fmt: skip


def test_zero_committed_in_the_middle_of_a_batch(
    tiny: TinyCheckpoint, plain: list[list[int]]
) -> None:
    """A step of which one request commits nothing is as if it had not been run for it."""
    prompts, params = make_prompts(12)[:3], make_params(12)[:3]
    known = {tuple(p): tokens for p, tokens in zip(prompts, plain, strict=False)}
    engine = scripted_engine(tiny.folder, known, random_script(2), 3)
    requests = [engine.make_request(p, one) for p, one in zip(prompts, params, strict=True)]
    for request in requests:
        engine.submit(request)
    steps = 0
    while engine.has_work:
        running = list(engine.scheduler.running)
        if running:
            with torch.inference_mode():
                verify_and_forget(engine.runner.decoder, [r.slot for r in running])
        engine.step()
        steps += 1
    assert [request.token_ids for request in requests] == plain[:3]
    assert steps > 3
