"""The engine on a CUDA device: the same tokens as on a CPU, with and without drafts."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from hybridspec import LLM, SamplingParams
from hybridspec.bundled import held_out_prompts
from hybridspec.ops.paged_attention import fa3
from hybridspec.runtime import KvMemory

pytestmark = pytest.mark.gpu

TEXTS = [prompt.text for prompt in held_out_prompts("code")[:8]]
# Small pools: tests run side by side, and shares of the device's memory would not fit.
DEVICE = {"device": "cuda", "max_model_len": 1024}
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
MIXED = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=40 + i, ignore_eos=True)
    for i in range(len(TEXTS))
]


def tokens(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(TEXTS, params)]


def test_float32_tokens_equal_those_of_the_cpu() -> None:
    on_cpu = tokens(LLM("bundled", device="cpu"), GREEDY)
    for k in (0, 3, 7):
        on_gpu = LLM("bundled", **DEVICE, dtype="float32", draft_tokens=k)
        assert tokens(on_gpu, GREEDY) == on_cpu, f"k={k}"


def test_float32_tokens_over_raw_rings_equal_those_of_the_cpu() -> None:
    on_cpu = tokens(LLM("bundled", device="cpu"), GREEDY)
    for k in (0, 3):
        on_gpu = LLM("bundled", **DEVICE, dtype="float32", draft_tokens=k, ring="raw")
        assert on_gpu._engine.resolved.backends["gated_delta_rule"][0] == "triton"
        assert tokens(on_gpu, GREEDY) == on_cpu, f"k={k}"


def test_sampled_tokens_do_not_depend_on_drafts_or_plan() -> None:
    plain = tokens(LLM("bundled", **DEVICE, dtype="float32", draft_tokens=0), MIXED)
    for k, rows in ((3, None), (7, None), (5, 20)):
        llm = LLM("bundled", **DEVICE, dtype="float32", draft_tokens=k, verify_rows=rows)
        assert tokens(llm, MIXED) == plain, f"k={k}, verify_rows={rows}"


def test_16_bit_weights_run_and_accept() -> None:
    llm = LLM("bundled", **DEVICE)
    assert llm.config.dtype == "bfloat16" and llm.config.state_dtype == "float32"
    results = llm.generate(TEXTS, GREEDY)
    committed = [count for r in results for count in r.stats.committed_per_step]
    assert sum(committed) / len(committed) > 2.5


NEAR_TIE = 0.07  # log-probability; half a unit of bf16 at scores between 16 and 32

needs_fa3 = pytest.mark.skipif(
    isinstance(fa3.installed_build(), str), reason=f"FlashAttention-3: {fa3.installed_build()}"
)
ATTENTION = [
    pytest.param("paged", "triton"),
    pytest.param("contiguous", "triton"),
    pytest.param("contiguous", "fa3", marks=needs_fa3),
]


@pytest.fixture(scope="module")
def by_reference() -> list:
    params = replace(GREEDY, logprobs=2)
    llm = LLM("bundled", **DEVICE, attention_backend="reference")
    return [result.outputs[0] for result in llm.generate(TEXTS, params)]


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize(("layout", "backend"), ATTENTION)
def test_what_attends_changes_near_ties_only(
    by_reference: list, layout: str, backend: str, k: int
) -> None:
    """In 16 bits: where a text first differs, both tokens are as likely, up to rounding."""
    llm = LLM("bundled", **DEVICE, kv_layout=layout, attention_backend=backend, draft_tokens=k)
    assert llm.config.attention_backend == llm.describe().backends["paged_attention"][0] == backend
    num_same = 0
    for right, mine in zip(by_reference, tokens(llm, GREEDY), strict=True):
        pairs = list(zip(right.token_ids, mine, strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            num_same += 1
            continue
        likely = right.logprobs[first]
        a, b = pairs[first]
        assert b in likely and likely[a].logprob - likely[b].logprob < NEAR_TIE
    assert num_same >= len(TEXTS) // 2


@pytest.mark.parametrize(("layout", "backend"), ATTENTION)
def test_nothing_is_read_that_others_left(layout: str, backend: str) -> None:
    """Two fresh engines, so that requests get the same slots and fold in the same steps."""
    options = DEVICE | {"kv_layout": layout, "attention_backend": backend}
    clean = tokens(LLM("bundled", **options), GREEDY)
    llm = LLM("bundled", **options)
    with torch.inference_mode():
        for pool in llm._engine.pools.of_kind(KvMemory):
            pool.k_pages.fill_(torch.nan)
            pool.v_pages.fill_(torch.nan)
    assert tokens(llm, GREEDY) == clean


def test_memory_is_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others take most of the memory, the share leaves 256 MiB for pools."""
    total = torch.cuda.get_device_properties(0).total_memory
    free = int(0.8 * total) + (256 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, total))
    gc.collect()
    before = torch.cuda.memory_allocated()
    llm = LLM("bundled", **DEVICE, memory_fraction=0.2, enforce_eager=True)  # graphs come on top
    taken = torch.cuda.memory_allocated() - before
    # Weights are 7 MiB of it, what products work in 32.
    assert 128 << 20 < taken < 320 << 20
    tokens(llm, GREEDY)
    assert llm._engine.allocator.num_live == 0
    info = llm.describe()
    assert info.num_requests_fit >= 1 and info.config.device.startswith("cuda")


def test_prefixes_are_reused_and_requests_begin_anew() -> None:
    """Captured steps, one ahead of the host; few pages, so that some requests are preempted."""
    source = held_out_prompts("code")[0].text
    whole = LLM("bundled", **DEVICE, dtype="float32", enable_prefix_caching=False)
    assert whole.tokenizer is not None
    ids = whole.tokenizer.encode("\n".join([source] * 40))
    prompts = [[*ids[:530], i + 1, *ids[: 7 * i]] for i in range(8)]
    params = [replace(one, max_tokens=90) for one in MIXED]
    right = whole.generate(prompt_token_ids=prompts, sampling_params=params)
    llm = LLM("bundled", **DEVICE, dtype="float32", enable_prefix_caching=True)
    engine = llm._engine
    del engine.allocator._free_pages[:-24]
    for _ in range(2):
        found = llm.generate(prompt_token_ids=prompts, sampling_params=params)
        for one, other in zip(right, found, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
    counters = engine.counters()
    assert counters.num_preemptions > 0 and counters.prefix_hits >= 512
    assert engine.allocator.num_free_pages == engine.pools.num_pages
