"""Prompts that reuse what was computed of others: the same tokens, and less work."""

from __future__ import annotations

import random
from typing import Any

import pytest

from helpers.books import check_books
from helpers.small_pools import fix_pools
from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams
from hybridspec.engine import resolve, scheduler
from hybridspec.engine.engine import Engine
from hybridspec.engine.request import Request
from hybridspec.engine.runner import Runner
from hybridspec.runtime import Allocator

PAGE, CHUNK = 8, 24
SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "seed": 3,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "bad_words": [[5, 6], [7, 8]],
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders that short prompts reach."""
    monkeypatch.setitem(scheduler.PROMPT_CHUNKS, "cpu", CHUNK)
    monkeypatch.setattr(resolve, "PAGE_SIZE", PAGE)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(count)]


def engine_of(tiny: TinyCheckpoint, *, late: int = 0, **options: Any) -> Engine:
    engine = LLM(tiny.folder, device="cpu", **options)._engine
    engine.run_ahead = late
    return engine


def submit(engine: Engine, prompt: list[int], **options: Any) -> Request:
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **options}
    request = engine.make_request(prompt, SamplingParams(**params))
    engine.submit(request)
    return request


def run(engine: Engine, prompt: list[int], **options: Any) -> list[list[int]]:
    request = submit(engine, prompt, **options)
    finish(engine)
    return [one.token_ids for one in request.continuations]


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    assert engine.allocator.num_live == 0
    assert engine.allocator.num_free_pages == engine.pools.num_pages


BORDERS = [border + offset for border in (PAGE, CHUNK, 2 * CHUNK) for offset in (-1, 0, 1)]


@pytest.mark.parametrize(
    ("drafting", "late"),
    [
        pytest.param({"draft_tokens": 0}, 0, id="plain"),
        pytest.param({"draft_tokens": 3}, 0, id="mtp"),
        pytest.param({"draft_tokens": 3}, 1, id="mtp, one step late"),
        pytest.param({"draft_tokens": 4, "drafter": "lookup"}, 0, id="lookup"),
    ],
)
def test_every_border(tiny: TinyCheckpoint, drafting: dict[str, Any], late: int) -> None:
    """Prefixes that end around pages and chunks, with rests of 0 tokens (the same prompt) to 30."""
    plain = engine_of(tiny, enable_prefix_caching=False, **drafting)
    prompts = [
        tokens(shared, seed=shared) + tokens(rest, seed=100 + rest)
        for shared in BORDERS
        for rest in (0, 1, 30)
    ]
    right = []
    for options in ({}, SAMPLED):
        requests = [submit(plain, prompt, max_tokens=7, **options) for prompt in prompts]
        finish(plain)
        right.append([request.token_ids for request in requests])
    engine = engine_of(tiny, late=late, **drafting)
    for i, prompt in enumerate(prompts):
        for expected, options in zip(right, ({}, SAMPLED), strict=True):
            before = engine.counters().prefix_hits
            assert run(engine, prompt, max_tokens=7, **options) == [expected[i]]
            hits = engine.counters().prefix_hits - before
            # The token behind a border has to be the same as well.
            assert hits % PAGE == 0 and hits < len(prompt)
            if options:  # the same prompt has just been here
                assert hits == (len(prompt) - 1) // PAGE * PAGE
    check_books(engine)
    assert plain.counters().prefix_queries == plain.counters().states_used == 0


def test_the_draft_head_sees_what_it_would(tiny: TinyCheckpoint) -> None:
    """As many drafts are right with reuse as without: no row of the head's log is another's."""
    stats = []
    common = tokens(2 * CHUNK)
    for reuse in (False, True):
        engine = engine_of(tiny, draft_tokens=3, enable_prefix_caching=reuse)
        run(engine, [*common, 5, 9])
        requests = [
            submit(engine, [*common, last, *tokens(9, seed=last)], max_tokens=60)
            for last in (5, 6, 7)
        ]
        finish(engine)
        stats.append([request.stats.accepted_per_step for request in requests])
        assert (engine.counters().prefix_hits > 0) == reuse
    assert stats[0] == stats[1] and sum(map(sum, stats[0])) > 0


@pytest.mark.parametrize("late", [0, 1])
def test_a_donor_in_the_same_batch_and_one_that_is_aborted(tiny: TinyCheckpoint, late: int) -> None:
    """Who begins alike waits for the prompt in work, and goes on alone if that is given up."""
    common = tokens(3 * CHUNK + 5)
    plain = engine_of(tiny, enable_prefix_caching=False)
    [right] = run(plain, common)
    for num_steps in (0, 1, 2, 3, 4, 5, 6):
        engine = engine_of(tiny, late=late)
        donor, first, second = (submit(engine, common) for _ in range(3))
        for _ in range(num_steps):
            engine.step()
        if num_steps == 1:
            assert engine.counters().num_waiting == 2
        engine.abort(donor)
        finish(engine)
        assert first.token_ids == second.token_ids == right
        assert engine.counters().prefix_hits > 0
        check_books(engine)
    engine = engine_of(tiny, late=late)
    requests = [submit(engine, common) for _ in range(4)]
    finish(engine)
    assert all(request.token_ids == right for request in requests)
    # One is computed; the others compute what is behind the last border.
    last = (len(common) - 1) // PAGE * PAGE
    assert engine.counters().prompt_rows == len(common) + 3 * (len(common) - last)


@pytest.mark.parametrize("late", [0, 1])
def test_prefills_that_are_cut_for_those_that_wait(tiny: TinyCheckpoint, late: int) -> None:
    """Where every forward costs much, a prefill is cut where others part from it, or not at all."""
    plain = engine_of(tiny, enable_prefix_caching=False)
    engine = engine_of(tiny, late=late)
    engine.scheduler.keeps_last_border = False
    [alone] = run(plain, tokens(CHUNK - 1, seed=8))
    assert run(engine, tokens(CHUNK - 1, seed=8)) == [alone]
    assert engine.counters().num_prefills == 1 and engine.counters().states_used == 0
    common = tokens(2 * CHUNK + 2 * PAGE + 3)
    prompts = [common + tokens(rest, seed=rest) for rest in (9, 7, 8, 1)]
    prompts += [[*common[: PAGE + 1], 3, 3], common]
    requests = [submit(engine, prompt) for prompt in prompts]
    finish(engine)
    assert [[request.token_ids] for request in requests] == [run(plain, p) for p in prompts]
    shared = len(common) // PAGE * PAGE
    assert engine.counters().prefix_hits == 4 * shared + PAGE
    check_books(engine)


def test_continuations_prefill_once(tiny: TinyCheckpoint) -> None:
    prompt = tokens(2 * CHUNK + 3)
    options = {**SAMPLED, "n": 4}
    plain = engine_of(tiny, enable_prefix_caching=False)
    right = run(plain, prompt, **options)
    engine = engine_of(tiny)
    assert run(engine, prompt, **options) == right
    assert len({tuple(one) for one in right}) == 4
    assert plain.counters().prompt_rows == 4 * len(prompt)
    rest = len(prompt) - (len(prompt) - 1) // PAGE * PAGE
    assert engine.counters().prompt_rows == len(prompt) + 3 * rest


def test_a_prefix_is_never_written_again(tiny: TinyCheckpoint) -> None:
    """Pages and states of a prefix keep every bit while its donor and others go on."""
    engine = engine_of(tiny, draft_tokens=7)
    prompt = tokens(CHUNK + 1)
    donor = submit(engine, prompt, max_tokens=100)
    while donor.num_generated == 0:
        engine.step()
    [*_, prefix] = engine.allocator.prefixes._kept.values()
    pages, pools = list(prefix.pages), engine.pools

    def bits() -> list[Any]:
        found = [tensor[prefix.slot].clone() for tensor in pools.slot_tensors()]
        paged = [t for tensors in pools._page_tensors for t in tensors.values()]
        return found + [t[pages].clone() for t in [*paged, pools.token_pages]]

    before = bits()
    for i in range(3):
        submit(engine, [*prompt, *tokens(i, seed=i)], max_tokens=30)
    finish(engine)
    assert all((a == b).all() for a, b in zip(before, bits(), strict=True))


def test_least_recently_used_first_out(tiny: TinyCheckpoint) -> None:
    engine = engine_of(tiny, prefix_states=2)
    prompts = [tokens(PAGE + 1, seed=i) for i in range(3)]

    def hits(i: int) -> int:
        before = engine.counters().prefix_hits
        run(engine, prompts[i], max_tokens=2)
        return engine.counters().prefix_hits - before

    assert [hits(0), hits(1), hits(0), hits(2)] == [0, 0, PAGE, 0]
    assert (hits(0), hits(1)) == (PAGE, 0)
    counters = engine.counters()
    assert (counters.states_used, counters.num_states) == (2, 2)
    check_books(engine)


@pytest.mark.parametrize("late", [0, 1])
def test_prefixes_are_given_up_for_requests(tiny: TinyCheckpoint, late: int) -> None:
    """Pools of a fixed size that prefixes fill; requests get all of it, and begin anew at need."""
    rng = random.Random(late)
    plain = engine_of(tiny, enable_prefix_caching=False)
    engine = engine_of(tiny, late=late, prefix_states=12)
    fix_pools(engine, num_slots=4 + 12, num_pages=26)
    engine.allocator.max_slots = 4
    begins = [tokens(rng.choice([PAGE, CHUNK, 2 * CHUNK]), seed=i) for i in range(3)]
    asked, requests = [], []
    for i in range(24):
        prompt = rng.choice(begins) + tokens(1 + rng.randrange(9), seed=i)
        options = {"max_tokens": rng.choice([1, 5, 40]), "seed": i, "temperature": 0.8}
        asked.append((prompt, options))
        requests.append(submit(engine, prompt, **options))
        engine.step()
    finish(engine)
    for (prompt, options), request in zip(asked, requests, strict=True):
        assert [request.token_ids] == run(plain, prompt, **options)
    counters = engine.counters()
    assert counters.num_preemptions > 0 and counters.prefix_hits > 0
    check_books(engine)


def test_prompt_logprobs_are_computed_whole(tiny: TinyCheckpoint) -> None:
    engine = engine_of(tiny)
    prompt = tokens(2 * CHUNK)
    run(engine, prompt)
    request = submit(engine, prompt, prompt_logprobs=1)
    finish(engine)
    assert len(request.output().prompt_logprobs or []) == len(prompt)
    assert engine.counters().prefix_hits == 0
    run(engine, prompt)
    assert engine.counters().prefix_hits == 2 * CHUNK - PAGE


def test_no_continuation_overtakes_the_log_probabilities_of_its_prompt(
    tiny: TinyCheckpoint,
) -> None:
    """The first one computes all of a prompt that is kept; the others could begin behind it."""
    engine = engine_of(tiny)
    prompt = tokens(3 * CHUNK)
    [alone] = run(engine, prompt)
    request = submit(engine, prompt, prompt_logprobs=1, n=3)
    while engine.has_work:
        engine.step()
        for step in request.outbox:
            assert len(step.output.prompt_logprobs or []) == len(prompt)
    assert [one.token_ids for one in request.continuations] == [alone] * 3
    assert engine.counters().prefix_hits == 2 * (3 * CHUNK - PAGE)
    dropped = submit(engine, prompt, prompt_logprobs=1, n=3)
    engine.step()
    engine.abort(dropped)
    finish(engine)
    assert dropped.continuations[1].token_ids == alone


def test_an_admission_that_fails_lets_go_of_its_prefix(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny)
    [alone] = run(engine, tokens(CHUNK))

    def broken(*arguments: object) -> None:
        raise MemoryError("no room for another slot")

    with monkeypatch.context() as patch:
        patch.setattr(Allocator, "_take_slot", broken)
        request = submit(engine, tokens(CHUNK))
        finish(engine)
    assert isinstance(request.failure, MemoryError)
    assert run(engine, tokens(CHUNK)) == [alone]
    assert engine.counters().prefix_hits == CHUNK - PAGE
    check_books(engine)


@pytest.mark.parametrize("place", [(Allocator, "_clean"), (Runner, "write")], ids=["page", "row"])
def test_an_admission_that_fails_half_way_is_made_again(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]
) -> None:
    """The states of its prefix had been copied, and would have been cleared the second time."""
    engine = engine_of(tiny)
    prompts = [tokens(2 * CHUNK), [*tokens(CHUNK), 5, 6, 7]]
    alone = [run(engine, prompt) for prompt in prompts]

    def broken(*arguments: object) -> None:
        raise MemoryError("no room for what is uploaded")

    requests = [submit(engine, prompt) for prompt in prompts]
    with monkeypatch.context() as patch:
        patch.setattr(*place, broken)
        with pytest.raises(MemoryError):
            engine.step()
    assert engine.allocator.num_live == 0
    finish(engine)
    assert [[request.token_ids] for request in requests] == alone
    check_books(engine)


@pytest.mark.parametrize(
    "options",
    [{"enable_prefix_caching": False}, {"kv_layout": "contiguous"}],
    ids=["flag", "contiguous"],
)
def test_it_is_off(tiny: TinyCheckpoint, options: dict[str, Any]) -> None:
    engine = engine_of(tiny, **options)
    for _ in range(2):
        run(engine, tokens(CHUNK), max_tokens=2)
    counters = engine.counters()
    assert not engine.config.enable_prefix_caching
    assert counters.prefix_queries == counters.num_states == counters.states_used == 0


def test_pages_of_whole_requests_cannot_be_shared(tiny: TinyCheckpoint) -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching: True does not go with kv_layout"):
        engine_of(tiny, kv_layout="contiguous", enable_prefix_caching=True)
