"""Logits of NaN end their own request with an error, and no other one."""

from __future__ import annotations

import pytest
import torch

from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams
from hybridspec.engine.request import Request
from hybridspec.runtime import GdnMemory

PROMPTS = [list(range(i, i + 12)) for i in range(3)]


def greedy(**options: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **options)


@torch.inference_mode()
def run(llm: LLM, params: SamplingParams, *, spoiled_at: int | None) -> list[Request]:
    """Run all prompts; after so many steps the states of the second one turn into NaN."""
    engine = llm._engine
    requests = [engine.make_request(prompt, params) for prompt in PROMPTS]
    for request in requests:
        engine.submit(request)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps == spoiled_at:
            for pool in engine.pools.of_kind(GdnMemory):
                pool.state[requests[1].slot] = torch.nan
    return requests


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("params", [greedy(), greedy(logprobs=2)], ids=["tokens", "logprobs"])
def test_other_requests_are_unharmed(tiny: TinyCheckpoint, k: int, params: SamplingParams) -> None:
    llm = LLM(tiny.folder, draft_tokens=k, device="cpu")
    right = [request.token_ids for request in run(llm, params, spoiled_at=None)]
    found = run(llm, params, spoiled_at=4)
    assert [request.finish_reason for request in found] == ["length", "error", "length"]
    assert [found[0].token_ids, found[2].token_ids] == [right[0], right[2]]
    count = len(found[1].token_ids)
    assert 3 < count < 30 and found[1].token_ids == right[1][:count]
    output = found[1].output().outputs[0]
    assert f"new token {count + 1}: the model's logits hold NaN" in (output.error or "")
    assert found[0].output().outputs[0].error is None
    assert len(found[1].outbox[-1].token_ids) == 0 and found[1].outbox[-1].finished
    assert output.logprobs is None or len(output.logprobs) == count
    # The slot is given back clean.
    assert [request.token_ids for request in run(llm, params, spoiled_at=None)] == right


@pytest.mark.parametrize("k", [0, 3])
def test_a_model_of_nan_fails_at_once(tiny: TinyCheckpoint, k: int) -> None:
    llm = LLM(tiny.folder, draft_tokens=k, device="cpu")
    with torch.inference_mode():
        llm._engine.model.embedding.fill_(torch.nan)
    params = [greedy(), SamplingParams(temperature=1.0, seed=1, max_tokens=5)]
    for output in llm.generate(prompt_token_ids=PROMPTS[:2], sampling_params=params):
        [one] = output.outputs
        assert (one.finish_reason, one.token_ids) == ("error", [])
    [step] = llm.stream(prompt_token_ids=PROMPTS[0], sampling_params=params[0])
    assert (step.token_ids, step.origins, step.finish_reason) == ([], [], "error")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_infinite_weight_fails_at_once(tiny: TinyCheckpoint, temperature: float) -> None:
    llm = LLM(tiny.folder, device="cpu")
    with torch.inference_mode():
        llm._engine.model.head[5, 0] = torch.inf
    params = SamplingParams(temperature=temperature, seed=1, logprobs=1, max_tokens=200)
    [output] = llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=params)
    [one] = output.outputs
    assert one.finish_reason == "error" and "NaN or infinity" in (one.error or "")
    assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [0, 3])
def test_where_everything_is_forbidden_there_is_an_error(
    tiny: TinyCheckpoint, k: int, temperature: float
) -> None:
    llm = LLM(tiny.folder, draft_tokens=k, device="cpu")
    first = llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=greedy())[0].outputs[0]
    words = [[first.token_ids[0], token] for token in range(97)]
    params = SamplingParams(
        temperature=temperature, seed=1, top_k=1, max_tokens=9, ignore_eos=True, bad_words=words
    )
    [output] = llm.generate(prompt_token_ids=PROMPTS[0], sampling_params=params)
    [one] = output.outputs
    assert one.token_ids == first.token_ids[:1] and one.finish_reason == "error"
    assert "every token is forbidden" in (one.error or "")
