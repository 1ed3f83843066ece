"""Sampling options on a CUDA device: no token depends on drafts, and none on the device."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from helpers.sampling_cases import random_params
from hybridspec import LLM
from hybridspec.bundled import held_out_prompts

pytestmark = pytest.mark.gpu


def test_options_mixed_at_random() -> None:
    rng = random.Random(8)
    texts = [prompt.text[:200] for prompt in held_out_prompts("code")[:24]]
    params = [replace(random_params(rng), draft_tokens=None) for _ in texts]

    def generated(device: str, k: int) -> list[list[list[int]]]:
        llm = LLM("bundled", device=device, dtype="float32", draft_tokens=k, max_model_len=1024)
        results = llm.generate(texts, params)
        for result, one in zip(results, params, strict=True):
            assert (result.prompt_logprobs is None) == (one.prompt_logprobs is None)
            for output in result.outputs:
                assert (output.logprobs is None) == (one.logprobs is None)
        return [[output.token_ids for output in result.outputs] for result in results]

    plain = generated("cpu", 0)
    for k in (0, 3, 7):
        assert generated("cuda", k) == plain, f"k={k}"
