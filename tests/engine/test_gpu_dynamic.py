"""Steps whose sizes a policy chooses, on a CUDA device: the same tokens, and nothing waits."""

from __future__ import annotations

import random

import pytest
import torch

from helpers.no_sync import no_sync
from hybridspec import LLM, SamplingParams
from hybridspec.bundled import held_out_prompts
from hybridspec.engine.sizing import tell_calibration
from hybridspec.speculate import CostTable, DynamicPolicy, StepPlan

pytestmark = pytest.mark.gpu

TEXTS = [prompt.text for prompt in held_out_prompts("code")[:6]]
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=40 + 3 * i, ignore_eos=True)
    for i in range(len(TEXTS))
]
OPTIONS = {"device": "cuda", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4}


def tokens(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(TEXTS, PARAMS)]


def test_any_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph leaves is not what another one overwrites, whatever follows what."""
    plain = tokens(LLM("bundled", speculation="off", **OPTIONS))
    llm = LLM("bundled", speculation="dynamic", **OPTIONS)
    assert tokens(llm) == plain
    policy = llm._engine.runner.policy
    assert isinstance(policy, DynamicPolicy) and isinstance(policy.costs, CostTable)
    assert all(s > 0 for line in policy.costs.verify.values() for s in line.values())
    assert policy.report.seconds > 0 and policy.report.expected_s > 0
    rng, chosen = random.Random(2), set()

    def choose(policy: DynamicPolicy, num_requests: int) -> StepPlan:
        depth, policy.drafts = policy.drafts, rng.randrange(policy.num_drafts + 1)
        rows = rng.choice(policy.budgets(num_requests))
        chosen.add((rows, policy.drafts))
        return StepPlan(num_requests=num_requests, rows=rows, drafts=policy.drafts, depth=depth)

    monkeypatch.setattr(DynamicPolicy, "choose", choose)
    for _ in range(3):
        assert tokens(llm) == plain
    assert len(chosen) > 12


@torch.inference_mode()
def test_a_step_never_waits() -> None:
    """Not when its sizes are chosen, and not when what was learnt goes to the device."""
    engine = LLM("bundled", speculation="dynamic", **OPTIONS)._engine
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    requests = [engine.make_request([7 * i + 1, 4, 9], params) for i in range(4)]
    for request in requests:
        engine.submit(request)
    for _ in range(40):
        engine.step()
    runner = engine.runner
    runner.collect(0)
    for _ in range(20):
        with no_sync():
            runner.decode(requests)
        torch.cuda.synchronize()
        runner.collect(0)
        runner.policy._has_news = True
        with no_sync():
            tell_calibration(runner.policy, runner.decoder.calibration)
    assert torch.equal(runner.decoder.calibration.cpu(), runner.policy.table)
