"""Prompts beside requests that decode: a bounded number of rows, and the same chunks as alone."""

from __future__ import annotations

import time

import pytest

from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams
from hybridspec.engine import engine as engine_module
from hybridspec.engine import scheduler
from hybridspec.engine.engine import Engine
from hybridspec.engine.request import Request

CHUNK = 16
LONG = [(7 * i + 3) % 97 for i in range(4 * CHUNK + 5)]


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int, int]]]:
    """The prompt rows of every forward: request, first row and number."""
    monkeypatch.setitem(scheduler.PROMPT_CHUNKS, "cpu", CHUNK)
    seen: list[list[tuple[int, int, int]]] = []
    prefill = engine_module.Runner.prefill

    def watched(runner: object, chosen: list[tuple[Request, int]]) -> None:
        seen.append([(r.group.request_id, r.num_prefilled, rows) for r, rows in chosen])
        prefill(runner, chosen)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module.Runner, "prefill", watched)
    return seen


def submit(engine: Engine, *prompts: list[int]) -> list[Request]:
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=60, ignore_eos=True)
    requests = [engine.make_request(prompt, params) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    return requests


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_first_tokens_hold_up_nobody(tiny: TinyCheckpoint) -> None:
    """What a step brought is told before what is launched behind it ends: a prompt's last chunk."""
    engine = LLM(tiny.folder, draft_tokens=3, device="cpu")._engine
    engine.run_ahead = 1
    [other] = submit(engine, [5, 6, 7])
    for _ in range(3):
        engine.step()
    [request] = submit(engine, [4] * 5)
    before = other.num_generated
    engine.step()
    assert other.num_generated > before and request.num_generated == 0
    assert [launch.requests for launch in engine.runner.launched] == [[request], [other, request]]
    finish(engine)
    assert len(request.token_ids) == 60


def test_first_tokens_that_nothing_is_in_front_of_are_told_at_once(tiny: TinyCheckpoint) -> None:
    engine = LLM(tiny.folder, draft_tokens=3, device="cpu")._engine
    engine.run_ahead = 1
    [request] = submit(engine, [4] * 5)
    engine.step()
    assert request.num_generated == 1
    assert [launch.plan is None for launch in engine.runner.launched] == [False]
    finish(engine)


@pytest.mark.parametrize("late", [0, 1])
def test_steps_that_overlap_are_timed_once(tiny: TinyCheckpoint, late: int) -> None:
    engine = LLM(tiny.folder, draft_tokens=3, device="cpu")._engine
    engine.run_ahead = late
    begun = time.perf_counter()
    requests = submit(engine, [5, 6, 7], [4] * 5)
    finish(engine)
    seconds = time.perf_counter() - begun
    assert all(0 < request.stats.decode_s <= seconds for request in requests)


@pytest.mark.parametrize("late", [0, 1])
def test_a_long_prompt_stops_nobody(
    tiny: TinyCheckpoint, chunks: list[list[tuple[int, int, int]]], late: int
) -> None:
    """Every step beside it brings each of the others something, and takes a chunk at most."""
    engine = LLM(tiny.folder, draft_tokens=3, device="cpu")._engine
    engine.run_ahead = late
    others = submit(engine, [5, 6, 7], [9, 9, 1, 4])
    for _ in range(2 + late):
        engine.step()
    assert all(one.num_generated > 0 for one in others)
    chunks.clear()
    [first, second] = submit(engine, LONG, LONG[::-1])
    while second.num_generated == 0:
        before = [one.num_generated for one in others]
        engine.step()
        after = [one.num_generated for one in others]
        assert all(new > old for new, old in zip(after, before, strict=True))
        assert first.num_prefilled >= second.num_prefilled
    assert len(chunks) >= 2 * 5
    assert max(sum(rows for _, _, rows in one) for one in chunks) == CHUNK
    finish(engine)


def test_chunks_are_shorter_beside_decoding(
    tiny: TinyCheckpoint, chunks: list[list[tuple[int, int, int]]]
) -> None:
    """They end where longer ones do, too, so that prefixes kept there are found; same tokens."""
    found, tokens = [], []
    for others in ([], [[1, 2]]):
        engine = LLM(tiny.folder, draft_tokens=3, device="cpu")._engine
        engine.scheduler.chunk_beside = CHUNK // 2
        submit(engine, *others)
        for _ in others:
            engine.step()
        chunks.clear()
        [request] = submit(engine, LONG)
        finish(engine)
        mine = request.group.request_id
        found.append([first for one in chunks for r, first, _ in one if r == mine])
        tokens.append(request.token_ids)
    assert found[0] == list(range(0, len(LONG), CHUNK))
    assert found[1] == list(range(0, len(LONG), CHUNK // 2))
    assert tokens[0] == tokens[1]


def test_chunks_depend_on_the_prompt_alone(
    tiny: TinyCheckpoint, chunks: list[list[tuple[int, int, int]]]
) -> None:
    found, tokens = [], []
    for before, after in (([], []), ([[1, 2]], [[3] * 9]), ([], [LONG[::-1], [4] * 20])):
        engine = LLM(tiny.folder, draft_tokens=3, device="cpu", max_num_batched_tokens=40)._engine
        submit(engine, *before)
        for _ in range(2 * len(before)):
            engine.step()
        chunks.clear()
        [request, *_] = submit(engine, LONG, *after)
        finish(engine)
        mine = request.group.request_id
        found.append([(first, rows) for one in chunks for r, first, rows in one if r == mine])
        tokens.append(request.token_ids)
    assert found[0] == [(CHUNK * i, CHUNK) for i in range(4)] + [(4 * CHUNK, 5)]
    assert found[0] == found[1] == found[2]
    assert tokens[0] == tokens[1] == tokens[2]
    # Where nobody decodes, a forward takes the chunks of several prompts.
    assert max(len(one) for one in chunks) == 3
