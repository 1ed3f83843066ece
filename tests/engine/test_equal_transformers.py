"""Greedy tokens equal those of transformers' generate in fp32, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.tiny_checkpoints import TinyCheckpoint, build_tiny_checkpoint
from hybridspec import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def prompts_by_length(vocab: int) -> list[list[list[int]]]:
    """Four prompts of each of four lengths: transformers runs those of one length as a batch."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(0, vocab, (4, length), generator=generator).tolist()
        for length in (1, 5, 70, 133)
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


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim"),
    [(2, 2, 16, 32), (2, 4, 16, 24), (1, 3, 32, 16)],
    ids=["ratio1", "ratio2", "ratio3"],
)
def test_greedy_tokens(
    tmp_path: Path, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> None:
    checkpoint = build_tiny_checkpoint(
        tmp_path,
        seed=value_heads,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        eos_token_id=None,
    )
    groups = prompts_by_length(checkpoint.model.config.vocab_size)
    expected = [tokens for group in groups for tokens in transformers_tokens(checkpoint, group)]
    prompts = [prompt for group in groups for prompt in group]
    for k in (0, 3, 7):
        llm = LLM(tmp_path, draft_tokens=k, device="cpu")
        results = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY)
        assert [r.outputs[0].token_ids for r in results] == expected, f"k={k}"
        assert {len(set(tokens)) > 3 for tokens in expected} == {True}  # not a constant answer


def test_a_changed_weight_is_seen(tmp_path: Path) -> None:
    """Teeth: the comparison fails when the checkpoints differ a little."""
    build_tiny_checkpoint(tmp_path / "one", seed=4, eos_token_id=None)
    other = build_tiny_checkpoint(tmp_path / "two", seed=4, eos_token_id=None)
    with torch.no_grad():
        other.model.model.layers[1].linear_attn.A_log.add_(0.5)
    [prompts] = prompts_by_length(97)[2:3]
    llm = LLM(tmp_path / "one", device="cpu")
    results = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY)
    assert [r.outputs[0].token_ids for r in results] != transformers_tokens(other, prompts)
