"""What a captured graph works on lives as long as the graph."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from hybridspec import LLM, SamplingParams
from hybridspec.engine import capture


def test_what_a_function_works_on_lives_as_long_as_its_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replays: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(replay=lambda: replays.append("graph"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: contextlib.nullcontext())

    def recorded() -> tuple[capture.Replayed, weakref.ref]:
        outside = torch.zeros(3)
        return (
            capture.record(lambda: outside.add_(1).sum(), None, torch.device("cpu")),
            weakref.ref(outside),
        )

    found, outside = recorded()
    gc.collect()
    tensor = outside()
    assert tensor is not None and tensor.tolist() == [2, 2, 2]  # once before, once in the graph
    found.replay()
    assert replays == ["graph"]
    del tensor, found
    gc.collect()
    assert outside() is None


@pytest.mark.gpu
@pytest.mark.parametrize("exact", ["tokens", "bitwise"])
def test_replays_write_to_no_memory_that_is_free(exact: str) -> None:
    """All small blocks that torch would hand out next keep their contents while steps run."""
    options = {"device": "cuda", "max_model_len": 1024, "max_num_seqs": 8, "memory_fraction": 0.3}
    llm = LLM("bundled", exact=exact, draft_tokens=3, **options)
    blocks = [
        torch.full((size,), 7, dtype=torch.uint8, device="cuda")
        for size in (512, 1024, 2048, 4096, 65536)
        for _ in range(200)
    ]
    llm.generate(["def main():", "import os\n"] * 4, SamplingParams(max_tokens=60))
    assert all(bool((block == 7).all()) for block in blocks)
