"""Steps that fail in any of their operations, at random, while requests come and go.

Each request has the tokens that it has alone, or those up to where it was dropped and the reason;
and nothing stays behind.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.books import check_books
from helpers.small_pools import fix_pools
from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams
from hybridspec.engine import resolve, scheduler
from hybridspec.engine.engine import Engine
from hybridspec.engine.request import Request
from hybridspec.runtime import GdnMemory

PAGE, CHUNK, MOST = 8, 24, 80
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"draft_tokens": 0, "prefix_states": 2},
    "row by row": {"draft_tokens": 3, "max_num_batched_tokens": 1},
    "mtp": {"draft_tokens": 3, "prefix_states": 1, "max_num_batched_tokens": 65},
    "lookup": {"draft_tokens": 7, "drafter": "lookup", "max_num_batched_tokens": 63},
    "bitwise": {"draft_tokens": 3, "exact": "bitwise", "max_num_batched_tokens": 64},
    "no reuse": {"draft_tokens": 2, "enable_prefix_caching": False, "max_num_batched_tokens": 2},
}
Wanted = tuple[list[int], SamplingParams, list[list[int]]]  # prompt, parameters, tokens alone


class Injected(BaseException):
    """Raised by an operation of a step."""


class Failing(TorchDispatchMode):
    """Lets the operation of a number fail, before or after it is done."""

    def __init__(self, number: int, *, is_after: bool) -> None:
        super().__init__()
        self._left, self._is_after = number, is_after

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._left -= 1
        if self._left == 0 and not self._is_after:
            raise Injected(str(func))
        result = func(*args, **(kwargs or {}))
        if self._left == 0:
            raise Injected(f"after {func}")
        return result


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders that short prompts reach."""
    monkeypatch.setitem(scheduler.PROMPT_CHUNKS, "cpu", CHUNK)
    monkeypatch.setattr(resolve, "PAGE_SIZE", PAGE)


@pytest.fixture(scope="module")
def wanted(tiny: TinyCheckpoint) -> list[Wanted]:
    rng = random.Random(5)
    shared = [rng.randrange(97) for _ in range(MOST)]
    llm = LLM(tiny.folder, device="cpu", draft_tokens=0, max_model_len=MOST)
    found: list[Wanted] = []
    for i, length in enumerate([1, PAGE, PAGE + 1, CHUNK, CHUNK + 1, 40, 63, 65, MOST - 1]):
        more: list[dict[str, Any]] = [
            {}, {"n": 3, "stop_token_ids": [3, 4, 9]}, {"bad_words": [[5], [7, 8]]},
            {"presence_penalty": 0.7, "logprobs": 2}, {"logit_bias": {3: 2.0, 40: 2.0}},
        ]  # fmt: skip
        options = {"temperature": 1.0, "seed": i, "max_tokens": 2 + 3 * i, **more[i % len(more)]}
        params = SamplingParams(ignore_eos=True, **options)
        [one] = llm.generate(prompt_token_ids=shared[:length], sampling_params=params)
        found.append((shared[:length], params, [list(o.token_ids) for o in one.outputs]))
    return found


def check(engine: Engine, seed: int, wanted: list[Wanted]) -> int:
    """Run a session; returns how many steps failed."""
    rng = random.Random(seed)
    engine.run_ahead = rng.choice([0, 1])
    if rng.random() < 0.6:
        fix_pools(engine, num_slots=rng.choice([2, 4]), num_pages=rng.choice([11, 20]))
        engine.allocator.max_slots = 2
    there: list[tuple[Request, list[list[int]]]] = []
    spoilt: set[Request] = set()
    num_failed = 0
    for _ in range(30):
        if rng.random() < 0.5:
            prompt, params, tokens = rng.choice(wanted)
            request = engine.make_request(prompt, params)
            engine.submit(request)
            there.append((request, tokens))
        if there and rng.random() < 0.08:
            engine.drop(rng.choice(there)[0].continuations)
        if engine.scheduler.running and rng.random() < 0.05:
            request = rng.choice(engine.scheduler.running)
            spoilt.add(request)
            with torch.inference_mode():
                for memory in engine.pools.of_kind(GdnMemory):
                    memory.state[request.slot] = torch.nan
        number = rng.choice([rng.randrange(1, 900), rng.randrange(1, 60)])
        is_sound = rng.random() < 0.7
        try:
            with Failing(0 if is_sound else number, is_after=rng.random() < 0.3):
                engine.step()
        except Injected:
            num_failed += 1
    for _ in range(2000):
        if engine.has_work:
            engine.step()
    assert not engine.has_work
    check_books(engine)
    for request, tokens in there:
        for one, alone in zip(request.continuations, tokens, strict=True):
            if one in spoilt:
                continue
            if one.finish_reason == "abort":
                assert one.token_ids == alone[: len(one.token_ids)]
            else:
                assert one.finish_reason in ("length", "stop") and one.token_ids == alone
    return num_failed


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_whatever_fails_others_get_what_they_get_alone(
    tiny: TinyCheckpoint, wanted: list[Wanted], options: dict[str, Any]
) -> None:
    engine = LLM(tiny.folder, device="cpu", max_model_len=MOST, **options)._engine
    assert check(engine, len(options) + options["draft_tokens"], wanted) > 1


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_same_many_times(
    tiny: TinyCheckpoint, wanted: list[Wanted], options: dict[str, Any]
) -> None:
    for seed in range(100, 125):
        engine = LLM(tiny.folder, device="cpu", max_model_len=MOST, **options)._engine
        check(engine, seed, wanted)
