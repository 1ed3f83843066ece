"""Forwards of prompt rows that are captured give what they give operator by operator."""

from __future__ import annotations

import random

import pytest

from helpers.captured_on_cpu import capture_on_cpu, record_by_rerunning
from hybridspec import LLM, SamplingParams
from hybridspec.engine.prompt_graphs import CAPTURED_CHUNK, PromptGraphs, most_requests
from hybridspec.errors import UnsupportedError


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let forwards be captured without a GPU."""
    record_by_rerunning(monkeypatch)


def captured(llm: LLM, max_rows: int) -> PromptGraphs:
    """Let an engine run its prompts through graphs."""
    runner = llm._engine.runner
    llm._engine.scheduler.max_chunk = CAPTURED_CHUNK
    runner.prompts = PromptGraphs(runner.decoder, max_rows=max_rows)
    return runner.prompts


def replays(graphs: PromptGraphs) -> dict[int, int]:
    """How often each size was replayed."""
    return {one.step.token_ids.shape[0]: one.graph.count for one in graphs._graphs}


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_tokens_are_those_of_eager_forwards(on_cpu: None, draft_tokens: int) -> None:
    """Batches of every size, prompts of several chunks, and what no graph holds."""
    rng = random.Random(0)
    llm = LLM("bundled", draft_tokens=draft_tokens, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    batches = [[1], [5, 60], [63, 1, 30], [64], [200], [130] * 5, [600, 3], [1100], [4] * 20]
    prompts = [
        [[rng.randrange(1, 250) for _ in range(length)] for length in lengths]
        for lengths in batches
    ]

    def run() -> list[list[int]]:
        return [
            [
                result.outputs[0].token_ids
                for result in llm.generate(prompt_token_ids=batch, sampling_params=params)
            ]
            for batch in prompts
        ]

    expected = run()
    graphs = captured(llm, 1024)
    assert run() == expected  # of chunks twice as long
    assert all(count > 0 for count in replays(graphs).values()), replays(graphs)


def test_what_is_too_large_runs_eagerly(on_cpu: None) -> None:
    llm = LLM("bundled", draft_tokens=0, enable_prefix_caching=False)
    graphs = captured(llm, 64)
    params = SamplingParams(temperature=0, max_tokens=2)
    llm.generate(prompt_token_ids=[[7] * 65], sampling_params=params)
    llm.generate(prompt_token_ids=[[7, 8]] * (most_requests(64) + 1), sampling_params=params)
    assert replays(graphs) == {64: 0}
    llm.generate(prompt_token_ids=[[7, 8]] * most_requests(64), sampling_params=params)
    assert replays(graphs)[64] == 1


def test_padding_is_wiped(on_cpu: None) -> None:
    """A larger batch leaves nothing behind for a smaller one."""
    llm = LLM("bundled", draft_tokens=0, enable_prefix_caching=False)
    graphs = captured(llm, 64)
    params = SamplingParams(temperature=0, max_tokens=1)
    llm.generate(prompt_token_ids=[[9] * 16] * 4, sampling_params=params)
    llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=params)
    step = graphs._graphs[0].step
    assert step.slots.tolist()[1:] == [-1] * 3
    assert step.cu_seqlens.tolist() == [0, 3, 3, 3, 3]
    assert step.num_verify_tokens.tolist() == [3, 0, 0, 0]
    assert step.kv_len.tolist()[1:] == [0] * 3
    assert step.sources.tolist()[3:] == [-1] * 61
    assert step.token_ids.tolist()[3:] == [0] * 61


def test_what_reads_on_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="capture_prompts: no step of this engine"):
        LLM("bundled", capture_prompts=True)
    capture_on_cpu(monkeypatch, lambda: 1e-3)
    with pytest.raises(UnsupportedError, match="capture_prompts: gated_delta_rule of prompts"):
        LLM("bundled", capture_prompts=True, enforce_eager=False)
