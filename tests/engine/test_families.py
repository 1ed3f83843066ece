"""Models with experts: sampled and greedy output does not depend on drafts or batch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.tiny_checkpoints import Family, build_tiny_checkpoint
from hybridspec import LLM, SamplingParams


def make_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(8)
    prompts = [[rng.randrange(97) for _ in range(n)] for n in (1, 2, 3, 5, 9, 21, 66, 70)]
    kinds = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.9})
    params = [
        SamplingParams(**kinds[i % 3], seed=i, max_tokens=30 + i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_speculative_equals_plain(tmp_path: Path, family: Family) -> None:
    build_tiny_checkpoint(tmp_path, family=family, seed=12, num_experts=8, num_experts_per_tok=3)
    prompts, params = make_requests()
    alone = LLM(tmp_path, draft_tokens=0, device="cpu")
    plain = [
        alone.generate(prompt_token_ids=p, sampling_params=one)[0].outputs[0].token_ids
        for p, one in zip(prompts, params, strict=True)
    ]
    for options in ({"draft_tokens": 2}, {"draft_tokens": 7}, {"drafter": "lookup"}):
        llm = LLM(tmp_path, device="cpu", **options)
        results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
        assert [r.outputs[0].token_ids for r in results] == plain, options
    drafted = [count for r in results for count in r.stats.drafted_per_step]
    assert any(drafted)


def test_info_says_what_multiplies_experts(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, family="qwen3_5_moe")
    name, reason = LLM(tmp_path, device="cpu").describe().backends["experts"]
    assert name == "reference" and "not grouped: on a CPU" in reason


@pytest.mark.parametrize(("name", "is_captured"), [("triton", True), ("reference", False)])
def test_experts_that_the_host_reads_are_not_captured(
    tmp_path: Path, name: str, is_captured: bool
) -> None:
    """An engine that pretends to run on a GPU, where all other ops have kernels."""
    build_tiny_checkpoint(tmp_path, family="qwen3_5_moe")
    engine = LLM(tmp_path, device="cpu")._engine
    backends = dict.fromkeys(engine.resolved.backends, ("triton", ""))
    backends["experts"] = (name, "")
    engine.resolved = replace(engine.resolved, backends=backends)
    engine.pools.device = torch.device("cuda")
    assert engine._can_capture(None) is is_captured
