"""What a caller sets in torch for all that follows changes nothing here."""

from __future__ import annotations

import pytest

from helpers.tiny_checkpoints import TinyCheckpoint
from helpers.torch_globals import GLOBALS
from hybridspec import LLM, SamplingParams

PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.9, top_p=0.9, min_p=0.02, seed=1, max_tokens=20, n=2),
    SamplingParams(
        temperature=0.7, top_k=20, seed=2, max_tokens=20, repetition_penalty=1.3,
        frequency_penalty=0.4, presence_penalty=0.2, logit_bias={5: 2.0}, bad_words=[[7], [3, 4]],
    ),
]  # fmt: skip
PROMPTS = [[3, 1, 4], [1] * 20, [5, 9, 2, 6] * 4]


def tokens(llm: LLM) -> list[list[list[int]]]:
    results = llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)
    return [[output.token_ids for output in result.outputs] for result in results]


@pytest.mark.parametrize("kind", GLOBALS)
def test_generate(tiny: TinyCheckpoint, kind: str) -> None:
    """In a model that was loaded before, and in one that is loaded with it."""
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    expected = tokens(llm)
    with GLOBALS[kind]():
        found = tokens(llm)
        fresh = tokens(LLM(tiny.folder, draft_tokens=3, device="cpu"))
    assert found == expected
    assert fresh == expected
