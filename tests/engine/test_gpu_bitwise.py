"""exact="bitwise" on a GPU in bf16: no draft, batch or budget changes one bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridspec import LLM, SamplingParams
from hybridspec.bundled import bundled_model_path

pytestmark = pytest.mark.gpu

OPTIONS = {
    "device": "cuda", "dtype": "bfloat16", "exact": "bitwise", "memory_fraction": 0.5,
    "max_num_seqs": 8, "max_model_len": 1024,
}  # fmt: skip
TEXTS = [
    "def main():\n    import os", "class A(dict):\n    def ", "import json\n\ndef load(path):\n",
    "x = 1", "for line in ", "import os\n" * 80,
]  # fmt: skip
PARAMS = [
    SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=100, logprobs=64, ignore_eos=True)
    for i in range(len(TEXTS))
]

Reports = list[list[dict[int, float]]]


def reports_of(prompts: Sequence[Any], params: list[SamplingParams], **options: object) -> Reports:
    """Return the 64 most likely tokens of every position and their log-probabilities."""
    llm = LLM(**{"model": "bundled", **OPTIONS, **options})
    name = "prompts" if isinstance(prompts[0], str) else "prompt_token_ids"
    results = llm.generate(**{name: prompts}, sampling_params=params)
    return [
        [{token: entry.logprob for token, entry in one.items()} for one in r.outputs[0].logprobs]
        for r in results
    ]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def plain(request: pytest.FixtureRequest) -> tuple[str, Reports]:
    return request.param, reports_of(TEXTS, PARAMS, draft_tokens=0, state_dtype=request.param)


@pytest.mark.parametrize(
    "options",
    [{"draft_tokens": k} for k in (1, 3, 7)]
    + [{"draft_tokens": 5, "verify_rows": 11}, {"draft_tokens": 4, "drafter": "lookup"}],
    ids=str,
)
def test_drafts_and_budgets_change_no_bit(
    plain: tuple[str, Reports], options: dict[str, object]
) -> None:
    state, expected = plain
    assert reports_of(TEXTS, PARAMS, state_dtype=state, **options) == expected


def test_neighbours_change_no_bit(plain: tuple[str, Reports]) -> None:
    state, expected = plain
    for i in (0, 5):
        alone = reports_of(TEXTS[i : i + 1], PARAMS[i : i + 1], state_dtype=state, draft_tokens=2)
        assert alone == expected[i : i + 1]


def test_captured_steps_choose_the_same_tokens(plain: tuple[str, Reports]) -> None:
    """Reports of log-probabilities keep steps from being captured; without them they are."""
    state, expected = plain
    params = [dataclasses.replace(one, logprobs=None) for one in PARAMS]
    llm = LLM("bundled", **OPTIONS, state_dtype=state, draft_tokens=3)
    tokens = [result.outputs[0].token_ids for result in llm.generate(TEXTS, params)]
    assert tokens == [[next(iter(one)) for one in reports] for reports in expected]


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """Also where a prompt has more rows than the quickest kernels of experts take."""
    config = json.loads((bundled_model_path() / "config.json").read_text())
    config |= {
        "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"],
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"model": tmp_path, "dummy_weights": True}
    texts = [[i, i + 1, 7] * (i + 1) * 20 for i in range(6)]
    plain = reports_of(texts, PARAMS, draft_tokens=0, **options)
    assert reports_of(texts, PARAMS, draft_tokens=3, **options) == plain
    assert reports_of(texts, PARAMS, draft_tokens=5, verify_rows=9, **options) == plain
    assert reports_of(texts[3:4], PARAMS[3:4], draft_tokens=1, **options) == plain[3:4]
