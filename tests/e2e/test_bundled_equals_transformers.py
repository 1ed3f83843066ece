"""The bundled model's greedy tokens equal those of transformers, plain and speculative."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridspec import LLM, SamplingParams
from hybridspec.bundled import bundled_model_path, held_out_prompts


def transformers_tokens(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy tokens in fp32; the prompts are of one length, so a batch needs no padding."""
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path(), dtype=torch.float32).eval()
    out = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out[:, len(prompts[0]) :].tolist()


@pytest.mark.parametrize(
    ("num_prompts", "max_tokens"),
    [(4, 80), pytest.param(32, 200, marks=pytest.mark.slow)],
)
def test_greedy_tokens(num_prompts: int, max_tokens: int) -> None:
    llm = LLM("bundled", device="cpu")
    texts = [prompt.text for prompt in held_out_prompts("code")[:num_prompts]]
    prompts = [llm.tokenizer.encode(text)[:480] for text in texts]
    expected = transformers_tokens(prompts, max_tokens)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for k in (0, 3):
        llm = LLM("bundled", device="cpu", draft_tokens=k)
        results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
        assert [r.outputs[0].token_ids for r in results] == expected, f"k={k}"
        committed = [count for r in results for count in r.stats.committed_per_step]
    assert sum(committed) / len(committed) > 2.5  # drafts of a trained head are mostly right
