"""Where steps end: memories behind rejects, requests that leave, proposals of any length."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams
from hybridspec.config import EngineConfig
from hybridspec.engine.engine import Engine
from hybridspec.engine.request import Request
from hybridspec.engine.rules import seed_of
from hybridspec.ops.gated_delta_rule import materialize
from hybridspec.runtime import GdnMemory, KvMemory
from hybridspec.speculate import Draft

VOCAB = 97  # of the tiny checkpoints
PROMPTS = [[5, 17, 3, 5, 5, 88, 61, 2, 40], [41, 2], [9, 9, 30, 7]]


def sampled(**options: Any) -> SamplingParams:
    base = {"temperature": 1.0, "seed": 4, "max_tokens": 40, "ignore_eos": True}
    return SamplingParams(**{**base, **options})


class OneWrong:
    """Drafts the right tokens of one request, but for the one at some place of each step."""

    def __init__(self, right: list[int], place: int) -> None:
        self.right = right
        self.place = place

    def propose(
        self,
        slots: Sequence[int],
        histories: Sequence[array[int]],
        num_drafts: Sequence[int],
        *,
        has_confidences: bool,
    ) -> list[Draft]:
        drafts = []
        for history, count in zip(histories, num_drafts, strict=True):
            tokens = self.right[len(history) : len(history) + count]
            if self.place < count:
                tokens[self.place] = (tokens[self.place] + 1) % VOCAB
            drafts.append(Draft(tokens, []))
        return drafts


def submitted(engine: Engine, prompt: list[int], params: SamplingParams) -> Request:
    request = engine.make_request(prompt, params)
    engine.submit(request)
    return request


def memories(engine: Engine, slot: int) -> list[Tensor]:
    """All that the layers know of a request: states behind its last row, inputs, keys, values."""
    pools = engine.pools
    length = int(pools.seq_len[slot])
    slots = torch.tensor([slot], dtype=torch.int32)
    found = []
    for memory in pools.of_kind(GdnMemory):
        state, rows = memory.state.clone(), memory.conv_ring.shape[1]
        materialize(state, memory.ring, slots, slots, pools.history_len[slots])
        inputs = [(length - i) % rows for i in (1, 2, 3)]
        found += [state[slot], memory.conv_ring[slot, inputs]]
    for memory in (m for m in pools.memories if isinstance(m, KvMemory)):
        pages = memory.page_table[slot, : -(-length // pools.page_size)].long()
        found += [t[pages].flatten(0, 1)[:length] for t in (memory.k_pages, memory.v_pages)]
    return found


@pytest.mark.parametrize("place", range(5))
def test_rejects_leave_the_memories_of_plain_decoding(tiny: TinyCheckpoint, place: int) -> None:
    """A reject at every place of a step; at place 4 there is none."""
    plain = LLM(tiny.folder, draft_tokens=0, device="cpu")._engine
    request, expected = submitted(plain, PROMPTS[0], sampled()), {}
    while plain.has_work:
        plain.step()
        if request.slot is not None:
            expected[int(plain.pools.seq_len[request.slot])] = memories(plain, request.slot)
    right = request.history.tolist()

    config = EngineConfig(draft_tokens=4, device="cpu")
    engine = Engine(tiny.folder, config, drafter=OneWrong(right, place))
    request, compared = submitted(engine, PROMPTS[0], sampled()), 0
    while engine.has_work:
        engine.step()
        if request.slot is None:
            continue
        found = memories(engine, request.slot)
        for mine, its in zip(found, expected[int(engine.pools.seq_len[request.slot])], strict=True):
            torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)
        compared += 1
    assert request.history.tolist() == right
    assert compared >= 7 and request.stats.folds > 0
    assert set(request.stats.accepted_per_step[:-1]) == {place}


@pytest.mark.parametrize("late", [0, 1])
def test_a_request_may_leave_at_every_moment(tiny: TinyCheckpoint, late: int) -> None:
    """Before its prompt, inside it, behind any step; all continuations or one; nothing stays."""
    plain = LLM(tiny.folder, draft_tokens=0, device="cpu")
    params = sampled(
        n=3, max_tokens=6, presence_penalty=0.5, logit_bias={3: 1.0}, bad_words=[[1, 2]]
    )
    stays = sampled(max_tokens=9)
    [right] = plain.generate(prompt_token_ids=PROMPTS[0], sampling_params=params)
    [other] = plain.generate(prompt_token_ids=PROMPTS[1], sampling_params=stays)
    engine = LLM(tiny.folder, device="cpu", max_num_batched_tokens=4, max_num_seqs=3)._engine
    engine.run_ahead = late
    lengths = set()
    for moment in range(9):
        for leaving in (slice(0, 3), slice(1, 2)):
            witness = submitted(engine, PROMPTS[1], stays)
            request = submitted(engine, PROMPTS[0], params)
            for _ in range(moment):
                engine.step()
            engine.drop(request.continuations[leaving])
            while engine.has_work:
                engine.step()
            assert witness.token_ids == other.outputs[0].token_ids
            for one, output in zip(request.continuations, right.outputs, strict=True):
                lengths.add(one.num_generated)
                assert one.token_ids == output.token_ids[: one.num_generated]
                assert one.finish_reason == "abort" or one.token_ids == output.token_ids
            assert engine.allocator.num_live == 0 and not engine.runner.launched
            assert engine.allocator.num_free_pages == engine.pools.num_pages
            with torch.inference_mode():  # a slot that still held options would be refused
                for slot in range(engine.pools.num_slots):
                    assert engine.runner.decoder.sampling.write(slot, request.options)
                    engine.runner.release(slot)
    assert {0, 6} < lengths and len(lengths) > 3


class AnyLength:
    """Proposes too many tokens, too few or none, and as it likes of confidences."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def propose(
        self,
        slots: Sequence[int],
        histories: Sequence[array[int]],
        num_drafts: Sequence[int],
        *,
        has_confidences: bool,
    ) -> list[Draft]:
        rng, drafts = self.rng, []
        for history, count in zip(histories, num_drafts, strict=True):
            tokens = [rng.choice(history) for _ in range(rng.choice([0, 1, count, count + 3]))]
            numbers = [0.0, 1.0, 2.0, -1.0, math.nan, math.inf, -math.inf]
            sure = [rng.choice(numbers) for _ in range(rng.randrange(count + 3))]
            drafts.append(Draft(tokens, sure))
        return drafts


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"verify_rows": 4}, {"verify_rows": 8}, {"speculation": "dynamic"}],
    ids=["all rows", "4 rows", "8 rows", "dynamic"],
)
def test_proposals_of_any_length(tiny: TinyCheckpoint, options: dict[str, Any], late: int) -> None:
    """Fewer or more tokens than asked for, any confidences, fewer or more than tokens."""
    plain = LLM(tiny.folder, draft_tokens=0, device="cpu")
    params = [
        sampled(temperature=0, max_tokens=20),
        sampled(repetition_penalty=0.5, max_tokens=20),
        sampled(top_k=5, max_tokens=20),
    ]
    results = plain.generate(prompt_token_ids=PROMPTS, sampling_params=params)
    config = EngineConfig(draft_tokens=4, device="cpu", **options)
    engine = Engine(tiny.folder, config, drafter=AnyLength(random.Random(1)))
    engine.run_ahead = late
    requests = [submitted(engine, p, one) for p, one in zip(PROMPTS, params, strict=True)]
    while engine.has_work:
        engine.step()
    assert [r.token_ids for r in requests] == [r.outputs[0].token_ids for r in results]
    drafted = {count for r in requests for count in r.stats.drafted_per_step}
    assert {0, 1} <= drafted <= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_draft_outside_the_vocabulary(tiny: TinyCheckpoint, token: int) -> None:
    class Stranger:
        def propose(self, slots: Sequence[int], *_: Any, has_confidences: bool) -> list[Draft]:
            return [Draft([3, token], []) for _ in slots]

    config = EngineConfig(draft_tokens=4, device="cpu")
    engine = Engine(tiny.folder, config, drafter=Stranger())
    submitted(engine, PROMPTS[0], sampled())
    with pytest.raises(ValueError, match=rf"^drafter: expected tokens in 0\.\.96, got .*{token}"):
        engine.step()


def test_each_continuation_drafts_behind_its_own_first_token(tiny: TinyCheckpoint) -> None:
    """The draft head's row of the prompt's last token holds the token that follows it."""
    config = {"draft_tokens": 3, "device": "cpu"}
    together = LLM(tiny.folder, **config)._engine
    request = submitted(together, PROMPTS[0], sampled(n=4, max_tokens=9))
    while together.has_work:
        together.step()
    assert len({one.token_ids[0] for one in request.continuations}) > 1
    for one in request.continuations:
        alone = LLM(tiny.folder, **config)._engine
        seed = seed_of(4, one.index)
        same = submitted(alone, PROMPTS[0], sampled(seed=seed, max_tokens=9))
        while alone.has_work:
            alone.step()
        assert same.token_ids == one.token_ids
        drafts = [step.drafted for step in request.outbox if step.index == one.index]
        assert drafts == [step.drafted for step in same.outbox]
        assert len(drafts[1]) == 3
