"""What is written when requests get their slots: all at once, and without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from helpers.no_sync import no_sync
from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams
from hybridspec.engine.engine import Engine
from hybridspec.engine.request import Request

OPTIONS: dict[str, Any] = {
    "temperature": 0.8,
    "repetition_penalty": 1.2,
    "logit_bias": {5: 1.5, 3: -100},
    "bad_words": [[4, 9]],
    "min_tokens": 4,
    "stop_token_ids": [3],
    "seed": 1,
}
PROMPTS = [[7, 4, 9], [2] * 64, [5, 6] * 40]


def submitted(engine: Engine, options: Sequence[dict[str, Any]]) -> list[Request]:
    requests = [
        engine.make_request(prompt, SamplingParams(**one, ignore_eos=True))
        for prompt, one in zip(PROMPTS, options, strict=True)
    ]
    for request in requests:
        engine.submit(request)
    engine._take_in()
    return requests


def table_rows(engine: Engine) -> int:
    return engine.runner.decoder.requests.most_drafts + 1


def check_slot(engine: Engine, request: Request, draft_limit: int) -> None:
    """Everything in the request's slot is its own."""
    pools, slot = engine.pools, request.slot
    assert slot is not None
    prompt, pages = request.prompt_token_ids, list(engine.allocator.pages_of(slot))
    row = pools.page_table[slot].tolist()
    assert row == pages + [-1] * (len(row) - len(pages))
    # Of the prompt, and of what its prefill brings.
    rows = len(prompt) + min(table_rows(engine), request.limit)
    assert len(pages) == -(-rows // pools.page_size)
    logged = pools.token_pages[pages].flatten().tolist()
    assert logged[: len(prompt)] == prompt
    table = engine.runner.decoder.requests
    numbers = (table.draft_limit, table.last_position, table.num_drafts, table.is_done)
    assert [int(column[slot]) for column in numbers] == [
        draft_limit, len(prompt) + request.limit - 1, 0, 0
    ]  # fmt: skip
    assert not any(tensor[slot].any() for tensor in pools.start_tensors())


def soil(engine: Engine) -> None:
    """Leave something everywhere that a new request must not find; prefixes would be lost."""
    pools, table = engine.pools, engine.runner.decoder.requests
    for tensor in pools.slot_tensors():
        tensor.fill_(1)
    pools.page_table.fill_(0)
    pools.token_pages.fill_(11)
    for column in (table.draft_limit, table.last_position, table.num_drafts, table.is_done):
        column[:-1].fill_(2)  # the last row is nobody's


@torch.inference_mode()
def test_requests_that_come_together(tiny: TinyCheckpoint) -> None:
    engine = LLM(tiny.folder, draft_tokens=3, device="cpu", enable_prefix_caching=False)._engine
    submitted(engine, [{"max_tokens": 2}] * 3)
    while engine.has_work:  # so that the pools are large enough
        engine.step()
    soil(engine)
    requests = submitted(
        engine, [{"max_tokens": 9}, {"max_tokens": 70, "draft_tokens": 1}, {"max_tokens": 200}]
    )
    engine.scheduler.admit()
    assert engine.scheduler.prefilling == requests
    for request, draft_limit in zip(requests, (3, 1, 3), strict=True):
        check_slot(engine, request, draft_limit)
    held = [page for one in requests for page in engine.allocator.pages_of(one.slot)]
    assert len(set(held)) == len(held)


def test_an_admission_that_fails_is_made_up_for(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prompt is processed in a slot that was not prepared; who has gone is passed over."""
    engine = LLM(tiny.folder, draft_tokens=3, device="cpu", enable_prefix_caching=False)._engine
    options = [{"temperature": 0.0, "max_tokens": 8}] * 3
    right = submitted(engine, options)
    while engine.has_work:
        engine.step()
    prepare = type(engine.allocator).prepare
    prepared: list[list[int]] = []

    def fails_once(allocator: Any, slots: list[int]) -> None:
        prepared.append(slots)
        if len(prepared) == 1:
            raise RuntimeError("no memory")
        prepare(allocator, slots)

    monkeypatch.setattr(type(engine.allocator), "prepare", fails_once)
    with torch.inference_mode():
        soil(engine)
    requests = submitted(engine, options)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()
    engine.abort(requests[1])
    while engine.has_work:
        engine.step()
    assert len(prepared) == 2 and len(set(prepared[1])) == 2  # two of the three slots, anew
    assert [r.finish_reason for r in requests] == ["length", "abort", "length"]
    assert [requests[i].token_ids for i in (0, 2)] == [right[i].token_ids for i in (0, 2)]
    assert engine.allocator.num_live == 0


@pytest.mark.gpu
@torch.inference_mode()
def test_admission_on_a_gpu_waits_for_nothing() -> None:
    """Every option is written; the kernels were compiled and loaded by an admission before."""
    llm = LLM(
        "bundled",
        device="cuda",
        dtype="float32",
        draft_tokens=3,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
    engine = llm._engine
    options = [{**OPTIONS, "max_tokens": 9}, {**OPTIONS, "max_tokens": 70}, {"max_tokens": 200}]
    first = submitted(engine, options)
    while engine.has_work:
        engine.step()
    soil(engine)
    requests = submitted(engine, options)
    torch.cuda.synchronize()
    with no_sync():
        engine.scheduler.admit()
    torch.cuda.synchronize()
    for request in requests:
        check_slot(engine, request, 3)
    while engine.has_work:
        engine.step()
    # Noise is a function of seed and position.
    assert [one.token_ids for one in requests[:2]] == [one.token_ids for one in first[:2]]
