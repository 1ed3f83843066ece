"""What a caller sets in torch for all that follows changes nothing here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


GLOBALS: dict[str, Any] = {
    "fp64": lambda: default_dtype(torch.float64),
    "bf16": lambda: default_dtype(torch.bfloat16),
    "fp16": lambda: default_dtype(torch.float16),
    "device": lambda: default_device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast fp16": lambda: torch.autocast("cpu", torch.float16),
    "gradients": torch.enable_grad,
}
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
