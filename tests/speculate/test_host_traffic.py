"""How often a decode step reads from its device and writes to it: the numbers may not grow."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from helpers.no_sync import no_sync
from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams
from hybridspec.engine import resolve
from hybridspec.engine.engine import Engine
from hybridspec.engine.request import Request
from hybridspec.speculate import DraftsFromLists

READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
# The CPU backends of operators read on purpose; so does what lets drafters of lists take part.
COUNTED = ("hybridspec.speculate", "hybridspec.engine", "hybridspec.runtime.upload")

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "logit_bias": {5: 1.5, 3: -100},
    "min_tokens": 4,
    "stop_token_ids": [3],
}
KINDS = [
    pytest.param(GREEDY, None, id="greedy"),
    pytest.param(SAMPLED, 7, id="sampled with penalties and a row budget"),
]

# On a CPU: how many rows there are, how many drafts each request wants, and the result.
CPU_READS = {"Runner._run": 1, "MtpDrafter.propose": 1, "Runner.collect": 1}


def caller() -> FrameType:
    """The nearest frame outside torch and this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and module.split(".")[0] != "torch":
            return frame
        frame = frame.f_back
    raise AssertionError("nobody called")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Count, by function, values read from tensors and tensors made of values."""
    reads: Counter[str] = Counter()
    uploads: Counter[str] = Counter()

    def watched(original: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = caller()
            name = frame.f_code.co_qualname
            if frame.f_globals["__name__"].startswith(COUNTED) and not name.startswith(
                DraftsFromLists.__name__
            ):
                counts[name] += 1
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name), reads))
        for name in ("tensor", "frombuffer"):
            patch.setattr(torch, name, watched(getattr(torch, name), uploads))
        yield reads, uploads


def running(engine: Engine, options: dict[str, Any], count: int = 4) -> list[Request]:
    """Start requests and run them until all of them decode and nothing is unread."""
    params = SamplingParams(**options, max_tokens=100, ignore_eos=True, seed=1)
    requests = [engine.make_request([7 * i + 1, 4, 9, 2 + i], params) for i in range(count)]
    for request in requests:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    engine.runner.collect(0)
    assert [request.finish_reason for request in requests] == [None] * count
    return requests


@pytest.mark.parametrize(("options", "verify_rows"), KINDS)
def test_a_step_on_a_cpu(
    tiny: TinyCheckpoint,
    options: dict[str, Any],
    verify_rows: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = LLM(tiny.folder, draft_tokens=3, verify_rows=verify_rows, device="cpu")._engine
    requests = running(engine, options)
    for _ in range(4):
        with counted(monkeypatch) as (reads, uploads):
            engine.step()
        assert (reads, uploads) == (CPU_READS, {})
    assert sum(sum(request.stats.drafted_per_step) for request in requests) > 0
    # Another batch is one upload.
    engine.abort(requests[1])
    with counted(monkeypatch) as (reads, uploads):
        engine.step()
    assert (reads, uploads) == (CPU_READS, {"upload_parts": 1})


@pytest.mark.parametrize("late", [0, 1])
def test_new_pages_travel_in_the_one_upload(
    tiny: TinyCheckpoint, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of requests that grow come with the lanes, or alone where these are the same."""
    monkeypatch.setattr(resolve, "PAGE_SIZE", 4)
    engine = LLM(tiny.folder, draft_tokens=3, device="cpu")._engine
    engine.run_ahead = late
    requests = running(engine, GREEDY)
    seen = set()
    for step in range(12):
        if step == 6:
            engine.abort(requests[1])
        held = [len(engine.allocator.pages_of(r.slot)) for r in requests if r.slot is not None]
        with counted(monkeypatch) as (_, uploads):
            engine.step()
        live = [request for request in requests if request.slot is not None]
        pages = [engine.allocator.pages_of(request.slot) for request in live]
        has_grown = [len(one) for one in pages] != held
        assert uploads == ({"upload_parts": 1} if has_grown or step == 6 else {})
        seen.add((has_grown, step == 6))
        for request, mine in zip(live, pages, strict=True):
            assert engine.pools.page_table[request.slot, : len(mine)].tolist() == list(mine)
    assert {(True, False), (False, False)} <= seen


def test_what_a_batch_asks_for_is_looked_up_once(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And anew when somebody joins or leaves."""
    engine = LLM(tiny.folder, draft_tokens=3, device="cpu")._engine
    requests = running(engine, GREEDY)
    batches = []
    asks = engine.runner._asks
    monkeypatch.setattr(
        engine.runner, "_asks", lambda batch: batches.append([*batch]) or asks(batch)
    )
    for _ in range(3):
        engine.step()
    assert batches == []
    engine.abort(requests[1])
    engine.step()
    engine.step()
    assert batches == [[requests[0], *requests[2:]]]
    options = SamplingParams(**SAMPLED, max_tokens=100, seed=1)
    engine.submit(engine.make_request([1, 2], options))
    for _ in range(3):
        engine.step()
    [_, prefilled, decoded] = batches
    assert decoded == [*batches[0], *prefilled]
    uses = engine.runner.decoder.sampling.uses([request.slot for request in decoded])
    assert uses.has_counts and uses.has_bias and uses.has_noise


def test_what_is_counted_is_seen(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read and an upload more would be found."""
    engine = LLM(tiny.folder, draft_tokens=3, device="cpu")._engine
    requests = running(engine, GREEDY)
    with counted(monkeypatch) as (reads, uploads):
        engine.runner.decoder.history(requests[0].slot, engine.pools.seq_len)
        engine.runner._upload([1, 2])
        assert bool(torch.ones(1)) and torch.tensor(3).item() == 3  # not the project's
    assert reads == {"Decoder.history": 2} and uploads == {"Runner._upload": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "captured"])
@pytest.mark.parametrize(("options", "verify_rows"), KINDS)
@torch.inference_mode()
def test_a_step_on_a_gpu(options: dict[str, Any], verify_rows: int | None, is_eager: bool) -> None:
    """It never waits; a copy of the lanes goes in, where the batch is another, and one comes out.

    The kernels were compiled and loaded by the steps before it.
    """
    llm = LLM(
        "bundled",
        device="cuda",
        dtype="float32",
        draft_tokens=3,
        verify_rows=verify_rows,
        enforce_eager=is_eager,
        max_model_len=1024,
        max_num_seqs=8,
    )
    engine = llm._engine
    runner = engine.runner
    assert (runner.graphs is None) == is_eager
    requests = running(engine, options)
    generated = [request.num_generated for request in requests]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for batch, num_in in ((requests, 0), (requests[::-1], 1)):
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            with no_sync():
                runner.decode(batch)
            torch.cuda.synchronize()
        names = [event.name for event in profile.events()]
        copies = Counter(name.split("(")[0].strip() for name in names if "Memcpy" in name)
        assert (copies["Memcpy HtoD"], copies["Memcpy DtoH"]) == (num_in, 1), names
        assert not any("Pageable" in name for name in names)
    runner.collect(0)
    assert all(
        request.num_generated >= before + 2
        for request, before in zip(requests, generated, strict=True)
    )
