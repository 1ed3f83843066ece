"""An admission that fails, at every place where it allocates."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from helpers.drafters import run
from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams
from hybridspec.ops.accept import RequestTable
from hybridspec.runtime import Allocator, SamplingPool

PROMPT = list(range(20))

FAILING = {
    "slot": (Allocator, "acquire"),
    "more slots": (SamplingPool, "resize"),
    "more rows": (SamplingPool, "_append"),
    "options": (SamplingPool, "_upload"),
    "more requests": (RequestTable, "resized"),
}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", FAILING)
def test_an_admission_that_fails_takes_nothing(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, place: str, error: type[BaseException]
) -> None:
    """Its request is told, the others go on; nothing is lost, whatever had been taken."""
    plain = LLM(tiny.folder, draft_tokens=0, device="cpu")
    params = SamplingParams(
        temperature=0, max_tokens=9, presence_penalty=0.5, logit_bias={3: 1.0}, bad_words=[[1, 2]]
    )
    prompts = [PROMPT, PROMPT[::-1], PROMPT]
    results = plain.generate(prompt_token_ids=prompts, sampling_params=params)
    expected = [result.outputs[0].token_ids for result in results]
    engine = LLM(tiny.folder, device="cpu")._engine
    owner, name = FAILING[place]
    whole, calls = getattr(owner, name), itertools.count()

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise error("injected")
        return whole(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        requests = [engine.make_request(prompt, params) for prompt in prompts]
        for request in requests:
            engine.submit(request)
        interrupts = 0
        while engine.has_work:
            try:
                engine.step()
            except KeyboardInterrupt:
                interrupts += 1
    assert next(calls) > 1 and interrupts == (error is KeyboardInterrupt)
    told = [str(request.failure) for request in requests if request.failure is not None]
    assert told == ["injected"] * (error is RuntimeError)
    for request, tokens in zip(requests, expected, strict=True):
        assert request.token_ids == ([] if request.failure else tokens)
    assert [request.token_ids for request in run(engine, prompts, [params] * 3)] == expected
    allocator, pools = engine.allocator, engine.pools
    assert (allocator.num_live, allocator.num_free_pages) == (0, pools.num_pages)
    with torch.inference_mode():
        for slot in range(pools.num_slots):
            assert engine.runner.decoder.sampling.write(slot, requests[0].options)
