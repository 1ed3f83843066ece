"""All options of a request together, against the processors of transformers."""

from __future__ import annotations

import random

import pytest
import torch

from helpers.lookup_cases import to_pages
from helpers.sampling_cases import VOCAB, expected_tokens, random_params, random_prompts
from hybridspec.config import SamplingParams
from hybridspec.ops.sampling import choose, cpu
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


def test_a_long_bad_word_is_read_as_far_as_it_is_like_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bodies of a server may hold words of many thousand tokens."""
    reads, real = [], cpu._token_at
    monkeypatch.setattr(cpu, "_token_at", lambda at, *rest: reads.append(at) or real(at, *rest))
    text, pool = [5, 6, 7, 7], SamplingPool(1, VOCAB)
    words = [[*[1] * 5000, 7, 7, 8], [6, 7, 7, 9], [7, 3]]
    assert pool.write(0, SlotOptions(bad_words=words))
    token_pages, page_table, seq_len = to_pages([text], 4)
    logits = torch.zeros(1, VOCAB)
    logits[0, [8, 9, 3]] = torch.tensor([1.0, 2.0, 3.0])
    found = choose(
        logits, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), pool.table,
        seq_len, torch.full((1, 0), -1), token_pages, page_table, uses=pool.uses([0]),
    )  # fmt: skip
    assert found.tolist() == [8]
    assert len(reads) == 3
