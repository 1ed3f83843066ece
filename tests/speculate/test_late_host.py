"""A host that learns one step late what a step brought: nothing wrong is fed, stored or told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.sampling_cases import random_params, random_prompts
from helpers.small_pools import fix_pools
from helpers.thinned import thinned
from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, RequestOutput, SamplingParams
from hybridspec.engine import resolve
from hybridspec.engine.engine import Engine
from hybridspec.engine.request import Request
from hybridspec.models.hybrid import HybridModel
from hybridspec.models.mtp import MtpHead
from hybridspec.ops.accept import RequestTable, Taken
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import GdnMemory, KvMemory

PROMPTS = [[5, 17, 3, 5, 5, 88], [41, 2], [9, 9, 30, 7]]


@pytest.fixture
def engine(tiny: TinyCheckpoint) -> Engine:
    return LLM(tiny.folder, draft_tokens=3, device="cpu")._engine


@pytest.fixture(autouse=True)
def fed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let every forward pass check its rows; how many rows each fed is returned.

    No row is fed a token that is none, or stands at a position without a page.
    """
    counts: list[int] = []

    def check(step: Step, tokens: Tensor, memory: KvMemory) -> None:
        size = memory.k_pages.shape[1]
        bounds, slots = step.cu_seqlens.tolist(), step.slots.tolist()
        for slot, first, end in zip(slots, bounds, bounds[1:], strict=False):
            if slot >= 0:
                pages = memory.page_table[slot, step.positions[first:end] // size]
                assert pages.numel() == 0 or int(pages.min()) >= 0
        assert int(tokens.min()) >= 0
        counts.append(bounds[-1])

    target, head = HybridModel.forward, MtpHead.forward

    def of_target(model: HybridModel, step: Step, memories: list[Any]) -> Tensor:
        pages = next(memory for memory in memories if isinstance(memory, KvMemory))
        check(step, step.token_ids, pages)
        return target(model, step, memories)

    def of_head(mtp: MtpHead, tokens: Tensor, hidden: Tensor, step: Step, memory: Any) -> Tensor:
        check(step, tokens, memory)
        return head(mtp, tokens, hidden, step, memory)

    monkeypatch.setattr(HybridModel, "forward", of_target)
    monkeypatch.setattr(MtpHead, "forward", of_head)
    yield counts
    assert counts


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, **options})


def alone(tiny: TinyCheckpoint, prompt: list[int], params: SamplingParams) -> RequestOutput:
    """What plain decoding says, one request at a time."""
    llm = LLM(tiny.folder, draft_tokens=0, device="cpu")
    return llm.generate(prompt_token_ids=prompt, sampling_params=params)[0]


def decoding(engine: Engine, params: list[SamplingParams]) -> list[Request]:
    """Requests behind their prefill, with all that is launched told."""
    requests = [engine.make_request(p, one) for p, one in zip(PROMPTS, params, strict=False)]
    for request in requests:
        engine.submit(request)
    with torch.inference_mode():
        engine._take_in()
        engine.scheduler.admit()
        engine.runner.fit_tables()
        engine.runner.prefill(engine.scheduler.prefill_chunks())
        engine.runner.collect(0)
        engine.scheduler.settle()
    assert all(request.num_generated == 1 for request in requests)
    return requests


@torch.inference_mode()
def decode_twice(engine: Engine, requests: list[Request], row: int) -> tuple[Taken, Taken]:
    """Launch two steps, then tell the host; what both brought for one request."""
    engine.runner.decode(requests)
    slot = requests[row].slot
    cursors = [t[slot].clone() for t in (engine.pools.seq_len, engine.pools.history_len)]
    engine.runner.decode(requests)
    after = [t[slot] for t in (engine.pools.seq_len, engine.pools.history_len)]
    assert cursors == after, "a step moved the cursors of a request that was done"
    launches = list(engine.runner.launched)
    engine.runner.collect(0)
    first, second = (Taken.of(launch.outcome.result.packed[row].tolist()) for launch in launches)
    return first, second


def finish(engine: Engine) -> None:
    engine.scheduler.settle()
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("end", ["token", "length", "nan"])
def test_the_device_ends_a_request(tiny: TinyCheckpoint, engine: Engine, end: str) -> None:
    """The step behind the one that ends it has no row of it; the others notice nothing."""
    right = [alone(tiny, prompt, greedy()).outputs[0].token_ids for prompt in PROMPTS]
    params = [greedy() for _ in PROMPTS]
    if end == "token":
        params[1] = greedy(stop_token_ids=[right[1][1]])
    elif end == "length":
        params[1] = greedy(max_tokens=2)
    requests = decoding(engine, params)
    if end == "nan":
        with torch.inference_mode():
            for memory in engine.pools.of_kind(GdnMemory):
                memory.state[requests[1].slot] = torch.nan
    first, second = decode_twice(engine, requests, 1)
    done = {
        "token": (RequestTable.DONE_BY_TOKEN, "stop", right[1][:2]),
        "length": (RequestTable.DONE_BY_LENGTH, "length", right[1][:2]),
        "nan": (RequestTable.DONE_BY_NAN, "error", right[1][:1]),
    }[end]
    assert (first.done, requests[1].finish_reason, requests[1].token_ids) == done
    assert (second.num_rows, second.tokens, second.drafts, second.done) == (0, [], [], 0)
    assert first.tokens == right[1][1:2] * (end != "nan")
    assert len(requests[1].outbox) == 2  # of the prefill and of the step that ended it
    finish(engine)
    assert [requests[i].token_ids for i in (0, 2)] == [right[0], right[2]]
    assert engine.allocator.num_live == 0


@pytest.mark.parametrize("k", [1, 3, 7])
def test_no_row_without_a_page(tiny: TinyCheckpoint, k: int, fed: list[int]) -> None:
    """A request that fills its last page to the end neither verifies nor drafts behind it."""
    engine = LLM(tiny.folder, draft_tokens=k, device="cpu")._engine
    size = engine.pools.page_size
    params = [greedy(max_tokens=size - len(prompt)) for prompt in PROMPTS]
    right = [
        alone(tiny, prompt, one).outputs[0].token_ids
        for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    requests = decoding(engine, params)
    fed.clear()
    with torch.inference_mode():
        for _ in range(size):
            engine.runner.decode(requests)
    assert fed[-1] == 0  # all were done before the host heard of any
    assert engine.pools.seq_len[[r.slot for r in requests]].tolist() == [size - 1] * len(requests)
    engine.runner.collect(0)
    assert [request.token_ids for request in requests] == right
    assert {request.finish_reason for request in requests} == {"length"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_string_is_found_late(tiny: TinyCheckpoint, temperature: float) -> None:
    """The step that was launched meanwhile is dropped; text, tokens and figures are the same."""
    params = greedy(temperature=temperature, seed=3)
    text = alone(tiny, PROMPTS[0], params).outputs[0].text
    stop = text[11:13]
    found = []
    for late in (0, 1):
        engine = LLM(tiny.folder, draft_tokens=3, device="cpu")._engine
        engine.run_ahead = late
        ending = greedy(temperature=temperature, seed=3, stop=[stop])
        requests = [engine.make_request(PROMPTS[0], one) for one in (ending, params)]
        for request in requests:
            engine.submit(request)
        while requests[0].finish_reason is None:
            engine.step()
        in_flight = [launch for launch in engine.runner.launched if requests[0] in launch.requests]
        assert len(in_flight) == late
        finish(engine)
        assert requests[0].token_ids != requests[1].token_ids
        found.append([(r.output().outputs, r.stats.committed_per_step) for r in requests])
    assert found[0] == found[1]
    [output] = found[0][0][0]
    assert (output.text, output.stop_reason) == (text[: text.index(stop)], stop)


def test_what_comes_for_a_cancelled_request_is_dropped(
    tiny: TinyCheckpoint, engine: Engine
) -> None:
    right = [alone(tiny, prompt, greedy()).outputs[0].token_ids for prompt in PROMPTS]
    requests = decoding(engine, [greedy() for _ in PROMPTS])
    with torch.inference_mode():
        engine.runner.decode(requests)
    engine.abort(requests[1])
    engine.runner.collect(0)
    assert (requests[1].num_generated, requests[1].finish_reason) == (1, "abort")
    assert len(requests[1].outbox) == 1 and requests[1].stats.committed_per_step == []
    finish(engine)
    assert [requests[i].token_ids for i in (0, 2)] == [right[0], right[2]]


@pytest.mark.parametrize("by_stop", [False, True], ids=["cancelled", "stopped"])
def test_a_slot_that_is_given_on_while_a_step_is_in_flight(
    tiny: TinyCheckpoint, by_stop: bool
) -> None:
    """What the step brings is the old owner's, who has gone; the new one gets its own tokens."""
    engine = LLM(tiny.folder, draft_tokens=3, device="cpu", max_num_seqs=1)._engine
    engine.run_ahead = 1
    old_params = greedy()
    if by_stop:
        text = alone(tiny, PROMPTS[0], greedy()).outputs[0].text
        old_params = greedy(stop=[text[8:10]])
    old, new = (
        engine.make_request(p, one) for p, one in zip(PROMPTS, (old_params, greedy()), strict=False)
    )
    for request in (old, new):
        engine.submit(request)
    for _ in range(3):
        engine.step()
    slot = old.slot
    if by_stop:
        while old.finish_reason is None:
            engine.step()
    else:
        engine.abort(old)
    assert [launch.requests for launch in engine.runner.launched] == [[old]]
    count, posted = old.num_generated, len(old.outbox)
    engine.step()
    assert (new.slot, old.slot) == (slot, None)
    finish(engine)
    assert new.token_ids == alone(tiny, PROMPTS[1], greedy()).outputs[0].token_ids
    assert (old.num_generated, len(old.outbox)) == (count, posted)


def test_a_result_belongs_to_an_admission(engine: Engine) -> None:
    """A request that was admitted anew gets nothing of the step that ran before."""
    requests = decoding(engine, [greedy() for _ in PROMPTS])
    with torch.inference_mode():
        engine.runner.decode(requests)
    requests[1].admission += 100
    engine.runner.collect(0)
    assert [len(r.outbox) for r in requests] == [2, 1, 2]
    assert requests[1].num_generated == 1


def ran(
    tiny: TinyCheckpoint, late: int, num_pages: int | None = None, **options: Any
) -> list[RequestOutput]:
    """Many requests with options at random through few slots; they join and leave all the time."""
    rng = random.Random(7)
    prompts = random_prompts(rng, 14)
    params = [
        random_params(rng, draft_tokens=None, stop=[chr(32 + rng.randrange(95))]) for _ in prompts
    ]
    engine = LLM(tiny.folder, device="cpu", max_num_seqs=5, **options)._engine
    engine.run_ahead = late
    if num_pages is not None:
        fix_pools(engine, num_slots=5, num_pages=num_pages)
    requests = []
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        requests.append(engine.make_request(prompt, one))
        engine.submit(requests[-1])
        if i % 3 == 2:
            engine.step()
    while engine.has_work:
        assert len({launch.turn for launch in engine.runner.launched}) <= late
        engine.step()
    assert engine.allocator.num_live == 0 and not engine.runner.launched
    assert engine.allocator.num_free_pages == engine.pools.num_pages
    return [request.output() for request in requests]


@pytest.mark.parametrize(
    "options",
    [
        {"draft_tokens": 0},
        {"draft_tokens": 3},
        {"draft_tokens": 5, "verify_rows": 9},
        {"draft_tokens": 2, "drafter": "lookup"},
    ],
    ids=["plain", "drafts", "row budget", "lookup"],
)
def test_an_engine_that_is_one_step_late(tiny: TinyCheckpoint, options: dict[str, Any]) -> None:
    """Every option, n > 1, stop strings and log-probabilities included, brings the same."""
    soon, late = (ran(tiny, late, **options) for late in (0, 1))
    reasons = set()
    for left, right in zip(soon, late, strict=True):
        for one, other in zip(left.outputs, right.outputs, strict=True):
            assert (one.token_ids, one.text) == (other.token_ids, other.text)
            ends = (one.finish_reason, one.stop_reason)
            assert ends == (other.finish_reason, other.stop_reason)
            reasons.add(type(one.stop_reason).__name__)
            assert (one.logprobs is None) == (other.logprobs is None)
            for a, b in zip(one.logprobs or [], other.logprobs or [], strict=True):
                assert a.keys() == b.keys()
                for token, report in a.items():
                    assert report.rank == b[token].rank
                    assert report.logprob == pytest.approx(b[token].logprob, abs=1e-4)
        if "verify_rows" not in options:  # whose drafts are verified depends on who else runs
            assert left.stats.committed_per_step == right.stats.committed_per_step
    assert reasons == {"str", "int", "NoneType"}
    assert any(len(one.outputs) > 1 for one in soon)
    assert any(one.outputs[0].logprobs for one in soon)


@pytest.mark.parametrize(("k", "late"), thinned([7, 0, 3], [0, 1]))
def test_pages_that_come_as_requests_grow(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, k: int, late: int
) -> None:
    """They are there before a row is; where they run out, requests begin anew and say the same."""
    right = ran(tiny, 0, draft_tokens=k)
    monkeypatch.setattr(resolve, "PAGE_SIZE", 4)
    found = ran(tiny, late, draft_tokens=k, num_pages=21)
    assert sum(output.stats.preemptions for output in found) > 0
    for left, other in zip(right, found, strict=True):
        for one, two in zip(left.outputs, other.outputs, strict=True):
            assert (one.token_ids, one.text) == (two.token_ids, two.text)
            assert (one.finish_reason, one.stop_reason) == (two.finish_reason, two.stop_reason)
            assert len(one.logprobs or []) == len(two.logprobs or [])
        committed = sum(other.stats.committed_per_step) + len(other.outputs)
        assert committed == sum(len(one.token_ids) for one in other.outputs)
