"""All options of a request together, against the processors of transformers."""

from __future__ import annotations

import random

import pytest
import torch

from helpers.lookup_cases import to_pages
from helpers.sampling_cases import VOCAB, expected_tokens, random_params, random_prompts
from hybridspec.config import SamplingParams
from hybridspec.ops.sampling import choose
from hybridspec.runtime import SamplingPool, SlotOptions


def slot_options(params: SamplingParams, prompt: list[int]) -> SlotOptions:
    assert params.seed is not None
    return SlotOptions(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        bias=params.logit_bias or {},
        bad_words=[word for word in params.bad_words if not isinstance(word, str)],
        ends=params.stop_token_ids,
        ends_from=len(prompt) + params.min_tokens,
    )


@pytest.mark.parametrize("seed", range(25))
def test_equals_transformers(seed: int) -> None:
    """Whether the tokens in front of a row are committed or pending."""
    rng = random.Random(seed)
    prompt = random_prompts(rng, 1)[0]
    params = random_params(rng)
    output = [rng.choice(prompt) for _ in range(5)]
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    expected = expected_tokens(logits, prompt, output, params)
    # A slot for each length of the output, with the rest of it as drafts.
    pool = SamplingPool(5, VOCAB)
    texts = []
    for place in range(5):
        said = output[:place]
        assert pool.write(place, slot_options(params, prompt), prompt=prompt, output=said)
        texts.append(prompt + said)
    drafts = torch.full((5, 4), -1)
    for place in range(5):
        drafts[place, : 5 - place - 1] = torch.tensor(output[place:4], dtype=torch.int64)
    token_pages, page_table, seq_len = to_pages(texts, 4)
    rows = [(slot, place) for slot in range(5) for place in range(slot, 5)]
    found = choose(
        logits[[place for _, place in rows]],
        torch.tensor([slot for slot, _ in rows], dtype=torch.int32),
        torch.tensor([place - slot for slot, place in rows], dtype=torch.int32),
        pool.table, seq_len, drafts, token_pages, page_table, uses=pool.uses(range(5)),
    )  # fmt: skip
    assert found.tolist() == [expected[place] for _, place in rows]
