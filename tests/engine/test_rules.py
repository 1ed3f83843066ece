"""From what callers set to what the sampler follows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import decoders, models, pre_tokenizers

from helpers.ascii_tokenizer import END, text_of, write_ascii_tokenizer
from helpers.tiny_checkpoints import build_tiny_checkpoint
from hybridspec import LLM, SamplingParams
from hybridspec.engine.rules import make_options, seed_of, word_tokens
from hybridspec.models import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, and a merge of a space with the letter behind it."""
    backend = JsonTokenizer(
        models.BPE(vocab={"Ġ": 0, "a": 1, "b": 2, "Ġa": 3, "ab": 4}, merges=[("Ġ", "a")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ab"], [(1, 2), (3, 2)]),  # at the start of a text, and behind a space
        ([" ab"], [(3, 2)]),
        (["b"], [(2,), (0, 2)]),
        (["ab", " a", "ab"], [(1, 2), (3, 2), (3,)]),
        ([(4, 1), [2]], [(4, 1), (2,)]),
        (["xyz"], [(0,)]),  # letters without a token cannot be said
    ],
)
def test_tokens_of_bad_words(
    tokenizer: Tokenizer, words: list[str], expected: list[tuple[int, ...]]
) -> None:
    assert word_tokens(words, tokenizer) == expected


def test_seeds_of_continuations() -> None:
    assert [seed_of(seed, 0) for seed in (0, 5, 2**63 - 1)] == [0, 5, 2**63 - 1]
    seeds = {seed_of(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_options_of_continuations() -> None:
    params = SamplingParams(n=2, presence_penalty=1, seed=3, min_tokens=2)
    given = {"vocab_size": 9, "tokenizer": None, "seeds": random.Random(0)}
    first, second = make_options(params, [7], frozenset({5, 99, -1}), **given)
    assert (first.seed, second.seed) == (3, seed_of(3, 1))
    assert first.ends == [-1, 5, 99] and first.ends_from == 3
    assert first.uses.has_counts and first.uses.has_masks
    [usual] = make_options(SamplingParams(), [7], frozenset({5}), **given)
    assert not usual.uses.has_edits and usual.ends_from == 0
    [other] = make_options(SamplingParams(), [7], frozenset(), **given)
    assert usual.seed != other.seed


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words": [[token] for token in range(9)]},
        {"allowed_token_ids": [3, 4], "bad_words": [[3], [4]]},
        {"allowed_token_ids": [5], "min_tokens": 1},
    ],
)
def test_a_request_that_may_say_nothing_is_refused(options: dict[str, object]) -> None:
    params = SamplingParams(**options)
    with pytest.raises(ValueError, match="at least one token that may be said"):
        make_options(
            params, [7], frozenset({5}), vocab_size=9, tokenizer=None, seeds=random.Random(0)
        )


def test_texts_as_bad_words(tmp_path: Path) -> None:
    """A text that the model would write does not appear."""
    build_tiny_checkpoint(tmp_path, eos_token_id=END, seed=2)
    write_ascii_tokenizer(tmp_path)
    llm = LLM(tmp_path, device="cpu")
    usual = SamplingParams(temperature=1, seed=8, max_tokens=40, ignore_eos=True)
    [before] = llm.generate("import os", usual)
    word = text_of(before.outputs[0].token_ids)[20:23].strip()
    assert word in before.outputs[0].text
    params = SamplingParams(
        temperature=1, seed=8, max_tokens=40, ignore_eos=True, bad_words=[word, "zzz"]
    )
    [after] = llm.generate("import os", params)
    kept = before.outputs[0].text.index(word) + len(word) - 1
    assert word not in after.outputs[0].text
    assert after.outputs[0].text[:kept] == before.outputs[0].text[:kept]
