"""Drafters that know, or deliberately miss, what the target will say."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from hybridspec.config import EngineConfig, SamplingParams
from hybridspec.engine.engine import Engine
from hybridspec.engine.request import Request
from hybridspec.speculate import Draft

__all__ = ["ScriptedDrafter", "run", "scripted_engine"]

VOCAB = 97  # of the tiny checkpoints
Script = Callable[[int, int], int]  # (right token, index) -> drafted token


class ScriptedDrafter:
    """Drafts what a script makes of the right continuation, known from plain decoding."""

    def __init__(self, continuations: dict[tuple[int, ...], list[int]], script: Script) -> None:
        self.continuations = continuations
        self.script = script
        self.engine: Engine | None = None
        self.confidence: Callable[[], float] = lambda: 0.5

    def propose(
        self,
        slots: Sequence[int],
        histories: Sequence[array[int]],
        num_drafts: Sequence[int],
        *,
        has_confidences: bool,
    ) -> list[Draft]:
        scheduler = self.engine.scheduler
        by_slot = {r.slot: r for r in [*scheduler.running, *scheduler.prefilling]}
        drafts = []
        for slot, history, count in zip(slots, histories, num_drafts, strict=True):
            prompt = tuple(by_slot[slot].prompt_token_ids)
            right, first = self.continuations[prompt], len(history) - len(prompt)
            tokens = [self.script(right[i], i) for i in range(first, first + count)]
            drafts.append(Draft(tokens, [self.confidence() for _ in tokens]))
        return drafts


def right_script(token: int, index: int) -> int:
    """Always right."""
    return token


def wrong_script(token: int, index: int) -> int:
    """Always wrong."""
    return (token + 1) % VOCAB


def random_script(seed: int) -> Script:
    """Right two times out of three."""
    rng = random.Random(seed)
    return lambda token, index: token if rng.random() < 0.67 else (token + 1) % VOCAB


def scripted_engine(
    folder: Path,
    continuations: dict[tuple[int, ...], list[int]],
    script: Script,
    k: int,
    **options: object,
) -> Engine:
    """An engine whose drafts follow a script; further options are those of `EngineConfig`."""
    drafter = ScriptedDrafter(continuations, script)
    options = {"device": "cpu", "dtype": "float32"} | options
    config = EngineConfig(draft_tokens=k, **options)
    drafter.engine = Engine(folder, config, drafter=drafter)
    return drafter.engine


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Request]:
    """Run requests to their end in one batch."""
    requests = [engine.make_request(p, one) for p, one in zip(prompts, params, strict=True)]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    return requests
