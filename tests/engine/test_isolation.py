"""An engine depends on no global of torch, and says so where it cannot work: in a forked child."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.tiny_checkpoints import TinyCheckpoint
from helpers.torch_globals import GLOBALS
from hybridspec import LLM, SamplingParams

PROMPTS = [[5, 17, 9], [3, 1, 4] * 9]
OPTIONS = {  # all that is done to logits
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.01,
    "logprobs": 2,
    "logit_bias": {3: 1.0},
    "bad_words": [[7, 8], [9]],
}
PARAMS = [
    SamplingParams(temperature=0.8, seed=3, max_tokens=20, **OPTIONS),
    SamplingParams(temperature=0, max_tokens=20),
]


def tokens(llm: LLM) -> list[list[int]]:
    results = llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def plain(tiny: TinyCheckpoint) -> list[list[int]]:
    return tokens(LLM(tiny.folder, device="cpu", draft_tokens=0))


@pytest.mark.parametrize("name", GLOBALS)
@pytest.mark.parametrize("options", [{}, {"drafter": "lookup"}, {"verify_rows": 5}], ids=str)
def test_globals_of_torch_change_nothing(
    tiny: TinyCheckpoint, plain: list[list[int]], name: str, options: dict[str, object]
) -> None:
    llm = LLM(tiny.folder, device="cpu", **options)
    with GLOBALS[name]():
        assert tokens(llm) == plain
        made = torch.ones(2) @ torch.ones(2, 2)  # the caller's own are as they were
    with GLOBALS[name]():
        expected = torch.ones(2) @ torch.ones(2, 2)
    assert (made.dtype, made.device) == (expected.dtype, expected.device)


@pytest.mark.parametrize("name", GLOBALS)
def test_globals_while_the_model_is_loaded(
    tiny: TinyCheckpoint, plain: list[list[int]], name: str
) -> None:
    with GLOBALS[name]():
        llm = LLM(tiny.folder, device="cpu")
        dummy = LLM(tiny.folder, device="cpu", dummy_weights=True)
    assert tokens(llm) == plain
    assert tokens(dummy) == tokens(LLM(tiny.folder, device="cpu", dummy_weights=True))


FORK = """
import os, sys, threading, time
from hybridspec import LLM

llm = LLM(sys.argv[1], device="cpu", threads=2)
stream = llm.stream(prompt_token_ids=[1, 2, 3])
next(stream)
is_in_step = threading.Event()

def step():
    with llm._engine.lock:
        is_in_step.set()
        time.sleep(60)

threading.Thread(target=step, daemon=True).start()
is_in_step.wait()
if os.fork() == 0:
    for use in (lambda: llm.generate(prompt_token_ids=[1, 2]), lambda: list(stream)):
        try:
            use()
        except RuntimeError as error:
            print(error, flush=True)
    os._exit(0)
_, status = os.wait()
os._exit(status)
"""


def test_a_forked_child_is_told(tiny: TinyCheckpoint) -> None:
    """While a step runs in another thread: the child would wait for it for ever."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(tiny.folder)],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "cannot be used" in line and "make one in each process" in line
