"""ring="raw": the same tokens as everything else, from rings of rows as they came."""

from __future__ import annotations

import random

import pytest
import torch

from helpers.drafters import random_script, run, scripted_engine, wrong_script
from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams, UnsupportedError
from hybridspec.engine import resolve, scheduler
from hybridspec.engine.engine import Engine
from hybridspec.ops.ring import RawRingView
from hybridspec.runtime import GdnMemory

COUNT = 8


def make_prompts(count: int = COUNT) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(97) for _ in range(rng.choice([1, 3, 20, 65]))] for _ in range(count)]


def make_params(count: int = COUNT) -> list[SamplingParams]:
    """Greedy and sampled requests of many lengths."""
    return [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=40 - 3 * (i % 5))
        for i in range(count)
    ]


def tokens_of(results: list) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


def memories(llm_or_engine: LLM | Engine) -> list[GdnMemory]:
    engine = getattr(llm_or_engine, "_engine", llm_or_engine)
    return engine.pools.of_kind(GdnMemory)


@pytest.fixture(scope="module")
def plain(tiny: TinyCheckpoint) -> list[list[int]]:
    """Plain decoding over rings of corrections, each request alone."""
    llm = LLM(tiny.folder, draft_tokens=0, device="cpu")
    pairs = zip(make_prompts(), make_params(), strict=True)
    return [tokens_of(llm.generate(prompt_token_ids=p, sampling_params=s))[0] for p, s in pairs]


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("drafter", ["mtp", "lookup"])
def test_tokens_are_those_of_plain_decoding(
    tiny: TinyCheckpoint, plain: list[list[int]], drafter: str, k: int
) -> None:
    llm = LLM(tiny.folder, draft_tokens=k, drafter=drafter, device="cpu", ring="raw")
    results = llm.generate(prompt_token_ids=make_prompts(), sampling_params=make_params())
    assert tokens_of(results) == plain
    for memory in memories(llm):
        assert isinstance(memory.ring, RawRingView)
        assert memory.ring.k.shape[2] == 16 and memory.ring.max_window == 15 - k


@pytest.mark.parametrize("script", [wrong_script, random_script(5)], ids=["wrong", "random"])
@pytest.mark.parametrize("verify_rows", [None, 9])
def test_whatever_is_drafted(
    tiny: TinyCheckpoint, plain: list[list[int]], script, verify_rows: int | None
) -> None:
    prompts, params = make_prompts(), make_params()
    right = {tuple(prompt): tokens for prompt, tokens in zip(prompts, plain, strict=True)}
    engine = scripted_engine(
        tiny.folder, right, script, 3, verify_rows=verify_rows, ring="raw"
    )  # fmt: skip
    assert [request.token_ids for request in run(engine, prompts, params)] == plain


def test_a_window_never_outgrows_its_rows(tiny: TinyCheckpoint, monkeypatch) -> None:
    """Folding steps included, however many rows were committed."""
    from hybridspec.ops import gated_delta_rule

    seen, usual = [], gated_delta_rule.verify_raw

    def verify(*arguments, **options):
        ring, cu_seqlens, slots = arguments[8:11]
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                size = int(cu_seqlens[i + 1] - cu_seqlens[i])
                seen.append((int(ring.history_len[slot]) + size, bool(options["is_fold"][i])))
        return usual(*arguments, **options)

    monkeypatch.setattr(gated_delta_rule, "verify_raw", verify)
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu", ring="raw", acceptance=[0.8])
    llm.generate(prompt_token_ids=make_prompts(), sampling_params=make_params())
    assert max(rows for rows, _ in seen) <= 16
    assert max(rows for rows, is_fold in seen if is_fold) > 12


def test_the_bytes_of_a_request(tiny: TinyCheckpoint) -> None:
    """Half the rows, and a number more for each."""
    usual, raw = (
        memories(LLM(tiny.folder, draft_tokens=3, device="cpu", ring=ring))[0].ring
        for ring in ("u", "raw")
    )
    assert usual.k.shape[2] == 2 * raw.k.shape[2]
    assert raw.a.dtype == raw.b.dtype == torch.float32
    assert raw.v.shape[1:] == (usual.u.shape[1], 16, usual.u.shape[3])


def test_16_bit_states_and_what_is_refused(tiny: TinyCheckpoint) -> None:
    options = {"device": "cpu", "ring": "raw"}
    llm = LLM(tiny.folder, state_dtype="bfloat16", **options)
    results = llm.generate(prompt_token_ids=make_prompts(2), sampling_params=make_params(2))
    assert all(len(result.outputs[0].token_ids) > 20 for result in results)
    with pytest.raises(UnsupportedError, match="ring: 'raw' does not go with state_dtype 'int8'"):
        LLM(tiny.folder, state_dtype="int8", **options)
    with pytest.raises(UnsupportedError, match="exact: 'bitwise' does not go with this ring"):
        LLM(tiny.folder, exact="bitwise", **options)
    with pytest.raises(ValueError, match="ring: expected one of u, raw, got 'both'"):
        LLM(tiny.folder, ring="both", device="cpu")


def test_prompts_that_reuse_a_prefix(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state at a border, where the window is empty, is all that is kept of a raw ring."""
    monkeypatch.setitem(scheduler.PROMPT_CHUNKS, "cpu", 24)
    monkeypatch.setattr(resolve, "PAGE_SIZE", 8)
    rng = random.Random(4)
    shared = [rng.randrange(97) for _ in range(60)]
    prompts = [[*shared, *(rng.randrange(97) for _ in range(9))] for _ in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    found = []
    for options in ({"ring": "raw"}, {"enable_prefix_caching": False}):
        llm = LLM(tiny.folder, draft_tokens=3, device="cpu", **options)
        results = [llm.generate(prompt_token_ids=one, sampling_params=params) for one in prompts]
        found.append([tokens_of(one)[0] for one in results])
        if "ring" in options:
            assert llm.counters().prefix_hits > 0
    assert found[0] == found[1]
