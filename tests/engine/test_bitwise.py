"""exact="bitwise" on a CPU: no draft, batch or budget changes one bit of a log-probability."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.drafters import random_script, right_script, run, scripted_engine, wrong_script
from helpers.small_pools import fix_pools
from helpers.tiny_checkpoints import TinyCheckpoint, build_tiny_checkpoint
from hybridspec import LLM, SamplingParams, UnsupportedError
from hybridspec.config import EngineConfig
from hybridspec.engine import resolve, scheduler
from hybridspec.engine.engine import Engine
from hybridspec.engine.exactness import ALIGNED_WINDOW, check_bitwise

NUM_NEW = 54  # more than two windows
BITWISE = {"exact": "bitwise", "device": "cpu"}
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2},
]
PARAMS = [
    SamplingParams(**kind, seed=70 + i, max_tokens=NUM_NEW - 8 * i, logprobs=-1)
    for i, kind in enumerate(KINDS)
]
_RNG = random.Random(6)
PROMPTS = [[_RNG.randrange(97) for _ in range(size)] for size in (1, 3, 20, 70)]

Reports = list[list[dict[int, float]]]


def values(reports: list) -> list[dict[int, float]]:
    """Return the log-probability of every token of the vocabulary, position by position."""
    assert all(len(one) == 97 for one in reports)
    return [{token: entry.logprob for token, entry in one.items()} for one in reports]


def reports_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Reports:
    results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    return [values(result.outputs[0].logprobs) for result in results]


@pytest.fixture(scope="module")
def alone(tiny: TinyCheckpoint) -> Reports:
    """Plain decoding, each request alone."""
    llm = LLM(tiny.folder, draft_tokens=0, **BITWISE)
    pairs = zip(PROMPTS, PARAMS, strict=True)
    return [reports_of(llm, [prompt], [params])[0] for prompt, params in pairs]


@pytest.mark.parametrize(
    "options",
    [
        {"draft_tokens": 0},
        {"draft_tokens": 1},
        {"draft_tokens": 3},
        {"draft_tokens": 7},
        {"draft_tokens": 5, "verify_rows": 9},
        {"draft_tokens": 3, "drafter": "lookup"},
        {"draft_tokens": 3, "max_num_batched_tokens": 70},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_batches_and_drafts_change_no_bit(
    tiny: TinyCheckpoint, alone: Reports, options: dict[str, object]
) -> None:
    assert reports_of(LLM(tiny.folder, **BITWISE, **options), PROMPTS, PARAMS) == alone


def scripted(
    folder: Path, script: Callable[[int, int], int], known: Reports, **options: object
) -> Engine:
    right = {
        tuple(prompt): [next(iter(one)) for one in reports]
        for prompt, reports in zip(PROMPTS, known, strict=True)
    }
    num_drafts = 7 if script is right_script else 3
    return scripted_engine(folder, right, script, num_drafts, **BITWISE, **options)


@pytest.mark.parametrize("script", [right_script, wrong_script, random_script(5)])
def test_neither_right_nor_wrong_drafts_change_a_bit(
    tiny: TinyCheckpoint, alone: Reports, script: Callable[[int, int], int]
) -> None:
    requests = run(scripted(tiny.folder, script, alone), PROMPTS, PARAMS)
    assert [values(request.logprobs) for request in requests] == alone


@pytest.fixture(scope="module")
def alone_in_16_bits(tiny: TinyCheckpoint) -> Reports:
    llm = LLM(tiny.folder, draft_tokens=0, state_dtype="bfloat16", **BITWISE)
    return reports_of(llm, PROMPTS, PARAMS)


def test_states_of_16_bits(tiny: TinyCheckpoint, alone_in_16_bits: Reports) -> None:
    """They are rounded at each fold, so that a fold elsewhere is seen."""
    engine = scripted(tiny.folder, random_script(5), alone_in_16_bits, state_dtype="bfloat16")
    requests = run(engine, PROMPTS, PARAMS)
    assert [values(request.logprobs) for request in requests] == alone_in_16_bits
    for request in requests:
        # The last token that is chosen is never fed.
        borders = (len(request.token_ids) - 2) // ALIGNED_WINDOW
        assert sum(step.is_fold for step in request.outbox) == borders


def test_a_fold_off_its_border_is_seen(tiny: TinyCheckpoint, alone_in_16_bits: Reports) -> None:
    engine = scripted(tiny.folder, random_script(5), alone_in_16_bits, state_dtype="bfloat16")
    object.__setattr__(engine.pools.specs.options, "is_aligned", False)
    requests = run(engine, PROMPTS, PARAMS)
    assert [values(request.logprobs) for request in requests] != alone_in_16_bits


def test_rows_of_a_step_end_at_a_border(tiny: TinyCheckpoint, alone: Reports) -> None:
    """Right drafts fill a window by three times eight rows, then the next one begins."""
    for request in run(scripted(tiny.folder, right_script, alone), PROMPTS, PARAMS):
        steps = list(request.outbox)[1:]
        assert [step.history_len for step in steps][:6] == [0, 8, 16, 24, 8, 16][: len(steps)]
        assert [step.is_fold for step in steps] == [step.history_len == 24 for step in steps]


def test_what_cannot_be_exact_is_refused_by_name(tiny: TinyCheckpoint) -> None:
    with pytest.raises(UnsupportedError, match=r"this attention_backend: FlashAttention-3 splits"):
        LLM(tiny.folder, **BITWISE, attention_backend="fa3")
    with pytest.raises(ValueError, match="exact: expected one of tokens, bitwise, got 'bits'"):
        LLM(tiny.folder, exact="bits")


@pytest.mark.parametrize(
    ("name", "options", "device", "state"),
    [
        ("kv_layout", {"kv_layout": "contiguous"}, "cuda", torch.float32),
        ("state_dtype", {}, "cpu", torch.int8),
    ],
)
def test_what_cannot_be_exact_on_some_device(
    name: str, options: Any, device: str, state: torch.dtype
) -> None:
    config = EngineConfig(exact="bitwise", **options)
    with pytest.raises(UnsupportedError, match=f"exact: 'bitwise' does not go with this {name}: "):
        check_bitwise(config, torch.device(device), state)
    check_bitwise(EngineConfig(), torch.device("cpu"), torch.half)


@pytest.mark.parametrize("is_bitwise", [True, False], ids=["where chunks end", "elsewhere"])
def test_reused_prefixes(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, is_bitwise: bool
) -> None:
    """Chunks of 24 tokens and pages of 8: what ends elsewhere has states that are rounded there."""
    monkeypatch.setitem(scheduler.PROMPT_CHUNKS, "cpu", 24)
    monkeypatch.setattr(resolve, "PAGE_SIZE", 8)
    common = [_RNG.randrange(97) for _ in range(60)]
    prompts = [common, [*common, 5, 6, 7], [*common, 5, 8], common[:49], common[:30]]
    params = [SamplingParams(temperature=0, max_tokens=5, logprobs=-1)] * len(prompts)
    options: dict[str, Any] = {**BITWISE, "state_dtype": "bfloat16"}
    whole = LLM(tiny.folder, enable_prefix_caching=False, **options)
    right = [reports_of(whole, [prompt], params[:1])[0] for prompt in prompts]
    llm = LLM(tiny.folder, **options)
    assert llm._engine.scheduler.is_bitwise
    llm._engine.scheduler.is_bitwise = is_bitwise
    found = [reports_of(llm, prompts, params) for _ in range(2)]
    assert (found == [right, right]) == is_bitwise
    if is_bitwise:
        assert llm.counters().prefix_hits == 7 * 48 + 2 * 24


@pytest.mark.parametrize(
    ("num_drafts", "late", "is_bitwise"),
    [
        pytest.param(0, 0, True, id="plain"),
        pytest.param(3, 1, True, id="mtp, one step late"),
        pytest.param(3, 0, False, id="answers are prefilled"),
    ],
)
def test_preempted_requests(
    tiny: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    alone_in_16_bits: Reports,
    num_drafts: int,
    late: int,
    is_bitwise: bool,
) -> None:
    """Pages for two of four; a preempted one says again what it said, and nobody hears it twice."""
    monkeypatch.setattr(resolve, "PAGE_SIZE", 8)
    llm = LLM(tiny.folder, draft_tokens=num_drafts, state_dtype="bfloat16", **BITWISE)
    engine = llm._engine
    fix_pools(engine, num_slots=5, num_pages=22)
    engine.run_ahead, engine.scheduler.is_bitwise = late, is_bitwise
    requests = run(engine, PROMPTS, PARAMS)
    found = [values(request.logprobs) for request in requests]
    assert (found == alone_in_16_bits) == is_bitwise
    assert engine.counters().num_preemptions > 0
    for request, params in zip(requests, PARAMS, strict=True):
        added = [token for step in request.outbox for token in step.token_ids]
        assert added == request.token_ids and len(added) == params.max_tokens


def test_a_step_of_which_half_was_said_shows_the_rest(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, alone: Reports
) -> None:
    """Rows shared with others split the second decoding elsewhere: origins stay those of tokens."""
    monkeypatch.setattr(resolve, "PAGE_SIZE", 8)
    engine = scripted(tiny.folder, right_script, alone, verify_rows=8)
    fix_pools(engine, num_slots=5, num_pages=22)
    requests = run(engine, PROMPTS, PARAMS)
    assert engine.counters().num_preemptions > 0
    for step in [step for request in requests for step in request.outbox]:
        accepted = step.origins.count("accepted")
        assert step.token_ids[:accepted] == step.drafted[:accepted]
    for stats in [request.stats for request in requests]:
        pairs = zip(stats.committed_per_step, stats.accepted_per_step, strict=True)
        assert all(accepted <= committed for committed, accepted in pairs)


def test_a_mixture_of_experts(tmp_path_factory: pytest.TempPathFactory) -> None:
    moe = build_tiny_checkpoint(
        tmp_path_factory.mktemp("moe"), family="qwen3_5_moe", eos_token_id=None, seed=2
    )
    prompts, params = PROMPTS[:2], [SamplingParams(temperature=0, max_tokens=30, logprobs=-1)] * 2
    plain = reports_of(LLM(moe.folder, draft_tokens=0, **BITWISE), prompts, params)
    assert reports_of(LLM(moe.folder, draft_tokens=3, **BITWISE), prompts, params) == plain


def test_info_says_which_one_runs(tiny: TinyCheckpoint) -> None:
    said = [LLM(tiny.folder, device="cpu", exact=one).describe() for one in ("tokens", "bitwise")]
    assert [info.config.exact for info in said] == ["tokens", "bitwise"]
    assert "bit for bit" in said[1].exactness
    assert "bit for bit" not in said[0].exactness
