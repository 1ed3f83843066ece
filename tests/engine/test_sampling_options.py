"""Every sampling option: speculative equals plain, and plain equals a slow second opinion."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.drafters import random_script, right_script, run, scripted_engine
from helpers.sampling_cases import expected_tokens, random_params, random_prompts
from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, RequestOutput, SamplingParams
from hybridspec.ops.accept import cpu as accept_cpu
from hybridspec.speculate import choose as choose_module

OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.8},
    "frequency": {"frequency_penalty": 1.3},
    "presence": {"presence_penalty": 1.9},
    "negative presence": {"presence_penalty": -1.0, "frequency_penalty": -0.3},
    "bias": {"logit_bias": {3: 4.0, 50: 5.5, 7: -100}},
    "bias and repetition": {"logit_bias": {3: 4.0, 50: 5.5, 7: -100}, "repetition_penalty": 1.4},
    "bad words": {"bad_words": [[token] for token in range(0, 97, 2)]},
    "bad pairs": {"bad_words": [[a, b] for a in range(97) for b in range(a % 4, 97, 4)]},
}


def two_prompts() -> list[list[int]]:
    return [[5, 17, 3, 5, 5, 88], [41]]


def generated(results: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in result.outputs] for result in results]


def target_logits(tiny: TinyCheckpoint, prompt: list[int], output: list[int]) -> torch.Tensor:
    """What transformers says before each token of an output, [T, V]."""
    with torch.inference_mode():
        logits = tiny.model(torch.tensor([prompt + output])).logits[0]
    return logits[len(prompt) - 1 : -1]


def test_options_mixed_at_random(tiny: TinyCheckpoint) -> None:
    """40 requests; plain ones run alone, speculative ones together."""
    rng = random.Random(5)
    prompts = random_prompts(rng, 40)
    params = [random_params(rng) for _ in prompts]
    llm = LLM(tiny.folder, draft_tokens=0, device="cpu")
    alone = [replace(p, draft_tokens=None) for p in params]
    plain = [
        llm.generate(prompt_token_ids=prompt, sampling_params=one)[0]
        for prompt, one in zip(prompts, alone, strict=True)
    ]
    for k in (3, 7):
        llm = LLM(tiny.folder, draft_tokens=k, device="cpu")
        results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
        assert generated(results) == generated(plain), f"k={k}"
        for result, one, expected in zip(results, params, plain, strict=True):
            assert max(result.stats.drafted_per_step, default=0) <= (
                k if one.draft_tokens is None else one.draft_tokens
            )
            assert_same_logprobs(result, expected)
    for prompt, one, result in zip(prompts, params, plain, strict=True):
        first = result.outputs[0].token_ids
        assert expected_tokens(target_logits(tiny, prompt, first), prompt, first, one) == first


@pytest.mark.slow
def test_200_requests_in_one_batch(tiny: TinyCheckpoint) -> None:
    rng = random.Random(6)
    prompts = random_prompts(rng, 200)
    params = [random_params(rng) for _ in prompts]
    without = [replace(one, draft_tokens=None) for one in params]
    plain, *speculative = [
        LLM(tiny.folder, draft_tokens=k, device="cpu").generate(
            prompt_token_ids=prompts, sampling_params=params if k else without
        )
        for k in (0, 3, 7)
    ]
    for results in speculative:
        assert generated(results) == generated(plain)
        for result, expected in zip(results, plain, strict=True):
            assert_same_logprobs(result, expected)
    for prompt, one, result in zip(prompts, params, plain, strict=True):
        first = result.outputs[0].token_ids
        assert expected_tokens(target_logits(tiny, prompt, first), prompt, first, one) == first


def assert_same_logprobs(result: RequestOutput, expected: RequestOutput) -> None:
    """The same tokens with the same numbers; rows of another batch round differently."""
    for output, other in zip(result.outputs, expected.outputs, strict=True):
        assert_same_reports(output.logprobs, other.logprobs)
    assert_same_reports(result.prompt_logprobs, expected.prompt_logprobs)


def assert_same_reports(reports: Any, others: Any) -> None:
    assert (reports is None) == (others is None)
    for report, other in zip(reports or [], others or [], strict=True):
        assert (report is None) == (other is None)
        if report is not None:
            assert list(report) == list(other)
            assert [p.rank for p in report.values()] == [p.rank for p in other.values()]
            values = [[p.logprob for p in some.values()] for some in (report, other)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_against_the_second_opinion(
    tiny: TinyCheckpoint, option: str, temperature: float
) -> None:
    """Right for the prefix, the same with drafts that are accepted, and not without effect."""
    params = SamplingParams(**OPTIONS[option], temperature=temperature, seed=3, max_tokens=24)
    neutral = SamplingParams(temperature=temperature, seed=3, max_tokens=24)
    llm = LLM(tiny.folder, draft_tokens=0, device="cpu")
    prompts = two_prompts()
    plain = [
        result.outputs[0].token_ids
        for result in llm.generate(prompt_token_ids=prompts, sampling_params=params)
    ]
    is_neutral = []
    for prompt, output in zip(prompts, plain, strict=True):
        logits = target_logits(tiny, prompt, output)
        assert expected_tokens(logits, prompt, output, params) == output
        is_neutral.append(expected_tokens(logits, prompt, output, neutral) == output)
    assert not all(is_neutral)
    known = {tuple(p): tokens for p, tokens in zip(prompts, plain, strict=True)}
    for script in (right_script, random_script(2)):
        engine = scripted_engine(tiny.folder, known, script, 7)
        requests = run(engine, prompts, [params] * 2)
        assert [request.token_ids for request in requests] == plain
        accepted = sum(sum(request.stats.accepted_per_step) for request in requests)
        assert accepted == 40 if script is right_script else 5 < accepted < 40


def test_drafts_before_a_row_count(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: rows that do not see the drafts before them give other tokens."""
    params = SamplingParams(**OPTIONS["frequency"], temperature=0, max_tokens=24)
    llm = LLM(tiny.folder, draft_tokens=0, device="cpu")
    prompts = two_prompts()
    results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    plain = [result.outputs[0].token_ids for result in results]
    known = {tuple(p): tokens for p, tokens in zip(prompts, plain, strict=True)}
    real = choose_module.choose

    def blind(logits: Any, slots: Any, offsets: Any, table: Any, seq_len: Any, drafts: Any,
              *rest: Any, **options: Any) -> Any:  # fmt: skip
        nothing = torch.full_like(drafts, -1)
        return real(logits, slots, offsets, table, seq_len, nothing, *rest, **options)

    monkeypatch.setattr(choose_module, "choose", blind)
    requests = run(scripted_engine(tiny.folder, known, right_script, 7), prompts, [params] * 2)
    assert [request.token_ids for request in requests] != plain


def test_what_was_said_counts(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth of the second opinion: an engine that forgets its output is found out."""
    params = SamplingParams(**OPTIONS["presence"], temperature=0, max_tokens=24)
    monkeypatch.setattr(accept_cpu, "_count", lambda counts, written: None)
    llm = LLM(tiny.folder, draft_tokens=0, device="cpu")
    [prompt, _] = two_prompts()
    [result] = llm.generate(prompt_token_ids=prompt, sampling_params=params)
    output = result.outputs[0].token_ids
    assert expected_tokens(target_logits(tiny, prompt, output), prompt, output, params) != output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neutral_values_change_nothing(tiny: TinyCheckpoint, temperature: float) -> None:
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    usual = SamplingParams(temperature=temperature, seed=4, max_tokens=20)
    spelt = replace(usual, repetition_penalty=1.0, presence_penalty=0, logit_bias={}, bad_words=[])
    idle = replace(usual, logit_bias={3: 0.0}, frequency_penalty=1e-9)
    results = [
        generated(llm.generate(prompt_token_ids=two_prompts(), sampling_params=params))
        for params in (usual, spelt, idle)
    ]
    assert results[0] == results[1] == results[2]
    [request] = [llm._engine.make_request([1], spelt)]
    assert not request.options.uses.has_edits


def test_bad_words_end_to_end(tiny: TinyCheckpoint) -> None:
    """A word that the model would say is not said, also where the prompt begins it."""
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    usual = SamplingParams(temperature=0, max_tokens=20)
    [prompt, _] = two_prompts()
    [[before]] = generated(llm.generate(prompt_token_ids=prompt, sampling_params=usual))
    across = [prompt[-1], before[0]]
    inside = before[5:8]
    params = replace(usual, bad_words=[across, inside])
    [[after]] = generated(llm.generate(prompt_token_ids=prompt, sampling_params=params))
    assert expected_tokens(target_logits(tiny, prompt, after), prompt, after, params) == after
    text = [*prompt, *after]
    assert after[0] != before[0]
    assert inside not in [text[i : i + 3] for i in range(len(text))]


def test_nothing_may_be_said(tiny: TinyCheckpoint) -> None:
    llm = LLM(tiny.folder, device="cpu")
    everything = [[token] for token in range(97)]
    message = "^bad_words, stop_token_ids, allowed_token_ids: expected at least one token"
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt_token_ids=[1], sampling_params=SamplingParams(bad_words=everything))
    most = SamplingParams(bad_words=everything[:-1], min_tokens=1, stop_token_ids=[96])
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt_token_ids=[1], sampling_params=most)
    last = SamplingParams(bad_words=everything[:-1], max_tokens=3)
    assert generated(llm.generate(prompt_token_ids=[1], sampling_params=last)) == [[[96] * 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {97: 1.0}}, "^logit_bias: expected ids below the vocabulary size 97"),
        ({"bad_words": [[1, 97]]}, "^bad_words: expected ids below the vocabulary size 97"),
        ({"bad_words": ["a"]}, "^bad_words: needs a tokenizer"),
        ({"logprobs": 98}, "^logprobs: expected at most the vocabulary size 97, got 98"),
        ({"prompt_logprobs": 98}, "^prompt_logprobs: expected at most the vocabulary size 97"),
        ({"draft_tokens": 4}, "^draft_tokens: expected at most the engine's 3, got 4"),
    ],
)
def test_what_the_model_cannot_do(
    tiny: TinyCheckpoint, options: dict[str, Any], message: str
) -> None:
    llm = LLM(tiny.folder, device="cpu")
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt_token_ids=[1], sampling_params=SamplingParams(**options))


def test_drafts_of_each_request(tiny: TinyCheckpoint) -> None:
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    params = [
        SamplingParams(temperature=0, max_tokens=20, draft_tokens=count)
        for count in (0, 1, 2, 3, None)
    ]
    results = llm.generate(prompt_token_ids=[[5, 17, 3]] * 5, sampling_params=params)
    assert [max(result.stats.drafted_per_step) for result in results] == [0, 1, 2, 3, 3]
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1


def test_continuations(tiny: TinyCheckpoint) -> None:
    """Each has noise of its own; the first is the one that n = 1 gives."""
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    prompts = two_prompts()
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=20, n=4, presence_penalty=0.5)
    results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    [single, _] = llm.generate(prompt_token_ids=prompts, sampling_params=replace(params, n=1))
    assert [output.index for output in results[0].outputs] == [0, 1, 2, 3]
    assert results[0].outputs[0].token_ids == single.outputs[0].token_ids
    assert len({tuple(output.token_ids) for output in results[0].outputs}) == 4
    assert results[0].request_id != results[1].request_id
    again = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    assert generated(again) == generated(results)
    fewer = llm.generate(prompt_token_ids=prompts, sampling_params=replace(params, n=2))
    assert generated(fewer)[0] == generated(results)[0][:2]
    stats = results[0].stats
    assert sum(stats.committed_per_step) == 4 * 19
    assert len(stats.drafted_per_step) == len(stats.committed_per_step)
    unseeded = llm.generate(prompt_token_ids=[1], sampling_params=replace(params, seed=None))
    assert len({tuple(output.token_ids) for output in unseeded[0].outputs}) == 4
    greedy = llm.generate(prompt_token_ids=[1], sampling_params=replace(params, temperature=0))
    assert len({tuple(output.token_ids) for output in greedy[0].outputs}) == 1


def test_a_stream_of_continuations(tiny: TinyCheckpoint) -> None:
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=12, n=3, logprobs=0)
    [whole] = llm.generate(prompt_token_ids=[5, 17], sampling_params=params)
    tokens: list[list[int]] = [[], [], []]
    finished = []
    for step in llm.stream(prompt_token_ids=[5, 17], sampling_params=params):
        tokens[step.index] += step.token_ids
        assert step.output.outputs[step.index].token_ids == tokens[step.index]
        assert [list(report) for report in step.logprobs] == [[token] for token in step.token_ids]
        if step.finished:
            finished.append(step.index)
            assert step.output.finished == (len(finished) == 3)
    assert [output.token_ids for output in whole.outputs] == tokens
    assert sorted(finished) == [0, 1, 2]
    assert llm._engine.allocator.num_live == 0


def test_logprobs_are_those_of_the_model(tiny: TinyCheckpoint) -> None:
    """Before bias, penalties and temperature; the token itself first, then the likeliest."""
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    [prompt, _] = two_prompts()
    params = SamplingParams(
        temperature=1.5, seed=2, max_tokens=20, logprobs=4, repetition_penalty=1.5,
        logit_bias={3: 2.0},
    )  # fmt: skip
    [result] = llm.generate(prompt_token_ids=prompt, sampling_params=params)
    [output] = result.outputs
    expected = torch.log_softmax(target_logits(tiny, prompt, output.token_ids), -1)
    assert output.logprobs is not None
    assert len(output.logprobs) == 20
    ranks = []
    for token, report, row in zip(output.token_ids, output.logprobs, expected, strict=True):
        order = row.argsort(descending=True).tolist()
        assert list(report) == list(dict.fromkeys([token, *order[:4]]))
        for other, found in report.items():
            assert found.logprob == pytest.approx(float(row[other]), abs=2e-5)
            assert found.rank == order.index(other) + 1
        ranks.append(report[token].rank)
    assert max(ranks) > 5  # so that the token is not always one of the likeliest
    own = [report[t].logprob for t, report in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(own))
    assert result.prompt_logprobs is None


def test_logprobs_end_with_the_tokens(tiny: TinyCheckpoint) -> None:
    """A stop inside a step leaves no report behind."""
    prompts = two_prompts()
    usual = SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.7, logprobs=1)
    llm = LLM(tiny.folder, draft_tokens=0, device="cpu")
    results = llm.generate(prompt_token_ids=prompts, sampling_params=usual)
    plain = [result.outputs[0].token_ids for result in results]
    known = {tuple(p): tokens for p, tokens in zip(prompts, plain, strict=True)}
    params = [replace(usual, stop_token_ids=[tokens[10]]) for tokens in plain]
    for request in run(scripted_engine(tiny.folder, known, right_script, 7), prompts, params):
        [output] = request.output().outputs
        assert output.finish_reason == "stop"
        assert [next(iter(r)) for r in output.logprobs] == output.token_ids


@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Also over chunks of the prompt, and in one continuation's prefill only."""
    from hybridspec.engine import runner, scheduler

    monkeypatch.setitem(scheduler.PROMPT_CHUNKS, "cpu", 9)
    monkeypatch.setattr(runner, "_ROWS_WITH_LOGITS", 4)
    rng = random.Random(1)
    prompts = [[rng.randrange(97) for _ in range(length)] for length in (1, 2, 9, 10, 31)]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=count, n=2)
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.prompt_logprobs) == len(prompt)
        assert result.prompt_logprobs[0] is None
        rows = torch.log_softmax(target_logits(tiny, prompt[:1], prompt[1:]), -1)
        for token, report, row in zip(prompt[1:], result.prompt_logprobs[1:], rows, strict=True):
            order = row.argsort(descending=True).tolist()
            assert list(report) == list(dict.fromkeys([token, *order[:count]]))
            for other, found in report.items():
                assert found.logprob == pytest.approx(float(row[other]), abs=2e-5)
                assert found.rank == order.index(other) + 1


def test_logprobs_of_all_tokens(tiny: TinyCheckpoint) -> None:
    llm = LLM(tiny.folder, device="cpu")
    every = SamplingParams(temperature=0, max_tokens=4, logprobs=-1, prompt_logprobs=-1)
    counted = SamplingParams(temperature=0, max_tokens=4, logprobs=97, prompt_logprobs=97)
    results = llm.generate(prompt_token_ids=[[5, 17, 3]] * 2, sampling_params=[every, counted])
    assert [len(report) for report in results[0].outputs[0].logprobs] == [97] * 4
    assert_same_logprobs(*results)
