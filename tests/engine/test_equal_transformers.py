"""Greedy tokens equal those of transformers' generate in fp32, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny_checkpoints import TinyCheckpoint, build_tiny_checkpoint
from hybridspec import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
# Of these, one per family in every run of the tests; others, with other ratios of heads, in all.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5-ratio3": {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 32,
    },
    "qwen3_5_moe-ratio2": {"family": "qwen3_5_moe"},
    "qwen3_next-ratio4": {"family": "qwen3_next", "linear_num_value_heads": 8},
}
MORE_KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5-ratio1": {"linear_num_value_heads": 2, "linear_value_head_dim": 32},
    "qwen3_5-ratio2": {"linear_value_head_dim": 24},
    "qwen3_5_moe-ratio3": {"family": "qwen3_5_moe", "linear_num_value_heads": 6},
    "qwen3_next-ratio2": {"family": "qwen3_next"},
}


def prompts_by_length(vocab: int) -> list[list[list[int]]]:
    """16 prompts, those of one length together: transformers runs them as a batch.

    Lengths from one to nine lie around the convolution's width and the rows of a verify step.
    """
    generator = torch.Generator().manual_seed(7)
    counts = {**dict.fromkeys(range(1, 10), 1), 70: 4, 133: 3}
    return [
        torch.randint(0, vocab, (count, length), generator=generator).tolist()
        for length, count in counts.items()
    ]


def transformers_tokens(checkpoint: TinyCheckpoint, prompts: list[list[int]]) -> list[list[int]]:
    out = checkpoint.model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
        max_new_tokens=64,
        min_new_tokens=64,
        do_sample=False,
        pad_token_id=0,
    )
    return out[:, len(prompts[0]) :].tolist()


def check_greedy_tokens(folder: Path, **options: Any) -> None:
    checkpoint = build_tiny_checkpoint(folder, seed=11, eos_token_id=None, **options)
    groups = prompts_by_length(checkpoint.model.config.vocab_size)
    expected = [tokens for group in groups for tokens in transformers_tokens(checkpoint, group)]
    prompts = [prompt for group in groups for prompt in group]
    for k in (0, 3, 7):
        llm = LLM(folder, draft_tokens=k, device="cpu")
        results = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY)
        assert [r.outputs[0].token_ids for r in results] == expected, f"k={k}"
    assert [len(tokens) for tokens in expected] == [64] * 16
    assert {len(set(tokens)) > 3 for tokens in expected} == {True}  # not a constant answer


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens(tmp_path: Path, kind: str) -> None:
    check_greedy_tokens(tmp_path, **KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE_KINDS)
def test_greedy_tokens_of_more_kinds(tmp_path: Path, kind: str) -> None:
    check_greedy_tokens(tmp_path, **MORE_KINDS[kind])


def test_a_changed_weight_is_seen(tmp_path: Path) -> None:
    """Teeth: the comparison fails when the checkpoints differ a little."""
    build_tiny_checkpoint(tmp_path / "one", seed=4, eos_token_id=None)
    other = build_tiny_checkpoint(tmp_path / "two", seed=4, eos_token_id=None)
    with torch.no_grad():
        other.model.model.layers[1].linear_attn.A_log.add_(0.5)
    prompts = prompts_by_length(97)[-1]
    llm = LLM(tmp_path / "one", device="cpu")
    results = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY)
    assert [r.outputs[0].token_ids for r in results] != transformers_tokens(other, prompts)
