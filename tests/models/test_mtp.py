"""The draft head against transformers' generic draft model holding the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.direct_runner import DirectRunner
from tests.helpers.tiny_checkpoints import TinyCheckpoint, build_tiny_checkpoint
from transformers.cache_utils import MtpCache

from hybridspec.models.hybrid import load_model

PROMPT = [(7 * i * i + 3) % 97 for i in range(41)]


VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied-composite": {"layout": "composite", "tie_word_embeddings": True},
    "moe": {"family": "qwen3_5_moe"},
    "moe-fused": {"family": "qwen3_5_moe", "experts": "fused", "layout": "language_model"},
    "next": {"family": "qwen3_next"},
}


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> TinyCheckpoint:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), **VARIANTS[request.param])


@torch.inference_mode()
def target_hidden(checkpoint: TinyCheckpoint, tokens: list[int]) -> torch.Tensor:
    return checkpoint.model.model(torch.tensor([tokens])).last_hidden_state[0]


def assert_hidden_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


def test_head_over_a_prompt_equals_transformers(checkpoint: TinyCheckpoint) -> None:
    runner = DirectRunner(load_model(checkpoint.folder))
    hidden = runner.prefill({1: PROMPT})[:-1]
    out = runner.draft({1: PROMPT[1:]}, hidden, is_prefill=True)
    cache = MtpCache(config=checkpoint.mtp.config)
    expected = checkpoint.draft_hidden(
        torch.tensor(PROMPT[1:]), target_hidden(checkpoint, PROMPT)[:-1], cache
    )
    assert_hidden_close(out, expected)
    with torch.inference_mode():
        torch.testing.assert_close(
            runner.logits(out), checkpoint.model.lm_head(expected), atol=2e-4, rtol=1e-5
        )


def test_drafting_on_its_own_outputs_equals_transformers(checkpoint: TinyCheckpoint) -> None:
    runner = DirectRunner(load_model(checkpoint.folder))
    out = runner.draft({1: PROMPT[1:]}, runner.prefill({1: PROMPT})[:-1], is_prefill=True)[-1:]
    cache = MtpCache(config=checkpoint.mtp.config)
    expected = checkpoint.draft_hidden(
        torch.tensor(PROMPT[1:]), target_hidden(checkpoint, PROMPT)[:-1], cache
    )[-1:]
    for _ in range(5):
        token = int(runner.logits(out).argmax())
        with torch.inference_mode():
            assert token == int(checkpoint.model.lm_head(expected).argmax())
        out = runner.draft({1: [token]}, out, is_prefill=False)
        expected = checkpoint.draft_hidden(torch.tensor([token]), expected, cache)
        assert_hidden_close(out, expected)


def test_rerun_over_accepted_rows_overwrites_what_drafting_left(
    checkpoint: TinyCheckpoint,
) -> None:
    tokens, prompt = PROMPT, PROMPT[:30]
    runner = DirectRunner(load_model(checkpoint.folder))
    out = runner.draft({0: prompt[1:]}, runner.prefill({0: prompt})[:-1], is_prefill=True)[-1:]
    for token in (5, 6, 7):  # drafts that are rejected
        out = runner.draft({0: [token]}, out, is_prefill=False)
    runner.mtp_seq_len[0] -= 3
    hidden = runner.verify({0: [*tokens[30:34], 9, 9]}, [4])[:4]
    last = target_hidden(checkpoint, tokens[:30])[-1:]
    actual = runner.draft({0: tokens[30:34]}, torch.cat((last, hidden[:3])), is_prefill=False)
    cache = MtpCache(config=checkpoint.mtp.config)
    expected = checkpoint.draft_hidden(
        torch.tensor(tokens[1:34]), target_hidden(checkpoint, tokens[:33]), cache
    )
    assert_hidden_close(actual, expected[-4:])


def test_folder_without_head_has_none(tmp_path: Any) -> None:
    build_tiny_checkpoint(tmp_path, has_mtp=False)
    assert load_model(tmp_path).mtp is None


@pytest.mark.parametrize("name", ["embedding_norm", "hidden_norm", "norm"])
def test_teeth_each_norm_shows(checkpoint: TinyCheckpoint, name: str) -> None:
    model = load_model(checkpoint.folder)
    getattr(model.mtp, name).scaled_weight[0] += 0.5
    runner = DirectRunner(model)
    out = runner.draft({1: PROMPT[1:]}, runner.prefill({1: PROMPT})[:-1], is_prefill=True)
    expected = checkpoint.draft_hidden(
        torch.tensor(PROMPT[1:]),
        target_hidden(checkpoint, PROMPT)[:-1],
        MtpCache(config=checkpoint.mtp.config),
    )
    with pytest.raises(AssertionError, match="not close"):
        assert_hidden_close(out, expected)


def test_teeth_swapped_inputs_show(checkpoint: TinyCheckpoint) -> None:
    model = load_model(checkpoint.folder)
    size = model.config.hidden_size
    model.mtp.in_weight.copy_(model.mtp.in_weight.roll(size, 1))
    runner = DirectRunner(model)
    out = runner.draft({1: PROMPT[1:]}, runner.prefill({1: PROMPT})[:-1], is_prefill=True)
    expected = checkpoint.draft_hidden(
        torch.tensor(PROMPT[1:]),
        target_hidden(checkpoint, PROMPT)[:-1],
        MtpCache(config=checkpoint.mtp.config),
    )
    with pytest.raises(AssertionError, match="not close"):
        assert_hidden_close(out, expected)
