"""Operators do not depend on torch's default dtype and device, nor on autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers.attention_cases import make_attention_batch
from helpers.choice_cases import random_case as random_choices
from helpers.conv_cases import make_conv_batch
from helpers.expert_cases import CASES as EXPERT_CASES
from helpers.expert_cases import MixCall
from helpers.gdn_cases import Case, Dtypes, VerifyCall
from helpers.plan_cases import random_case, run_plan
from helpers.rotary_cases import CASES, EPS, make_heads
from helpers.tolerances import assert_same
from helpers.torch_globals import GLOBALS
from hybridspec.ops import causal_conv1d, paged_attention
from hybridspec.ops.norms import gdn_gates
from hybridspec.ops.products import multiply
from hybridspec.ops.rotary import norm_and_rotate
from hybridspec.ops.sampling import gumbel_noise
from hybridspec.ops.verify_plan import cpu

F32 = torch.float32
Run = Callable[[], list[Tensor]]


def gdn() -> Run:
    call = VerifyCall(Case("globals", (4, 1), (14, 3), dtypes=Dtypes(F32, F32, F32)))
    inputs = call.inputs()
    call.inputs = lambda: inputs  # type: ignore[method-assign]
    return lambda: [call.run(), *call.pools.tensors()]


def conv(op: str, **limit: int) -> Run:
    batch = make_conv_batch([4, 1], [6, 0], [3, 1], dtype=F32)
    run = getattr(causal_conv1d, op)
    return lambda: [run(*batch.tensors, **limit), batch.conv_ring]


def attention(op: str, **limit: int) -> Run:
    batch = make_attention_batch([4, 1], [6, 0], [3, 1], dtype=F32)
    run = getattr(paged_attention, op)
    return lambda: [run(*batch.tensors, **limit), batch.k_pages, batch.v_pages]


def rotary() -> Run:
    heads = make_heads(CASES["odd sizes"], F32)
    return lambda: [norm_and_rotate(*heads, eps=EPS)]


def experts() -> Run:
    call = MixCall(EXPERT_CASES["odd sizes"], F32)
    return lambda: [call.run("reference")]


def product() -> Run:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=generator) for n in (5, 7))
    return lambda: [multiply(x, weight, dtype=torch.float16)]


def gates() -> Run:
    x, weight = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)), torch.ones(16)
    return lambda: list(gdn_gates(x, x, weight, weight, 2.0))


def sampling() -> Run:
    seeds, positions = torch.arange(6), torch.arange(6) + 9
    case = random_choices(9, slots=5, drafts=2)

    def run() -> list[Tensor]:
        return [gumbel_noise(seeds, positions, 50), case.choose()]

    return run


def plan() -> Run:
    case = random_case(torch.Generator().manual_seed(2), 9, 4, kind="uniform")
    return lambda: list(run_plan(case, cpu.plan_step).tensors())


OPS: dict[str, Callable[[], Run]] = {
    "gated_delta_rule.verify": gdn,
    "causal_conv1d.verify": lambda: conv("verify", max_verify_tokens=4),
    "causal_conv1d.prefill": lambda: conv("prefill", max_seqlen=4),
    "paged_attention.verify": lambda: attention("verify", max_verify_tokens=4),
    "paged_attention.prefill": lambda: attention("prefill", max_seqlen=4),
    "norm_and_rotate": rotary,
    "experts.mix": experts,
    "products.multiply": product,
    "gdn_gates": gates,
    "sampling": sampling,
    "plan_step": plan,
}


@pytest.mark.parametrize("kind", GLOBALS)
@pytest.mark.parametrize("name", OPS)
def test_an_operator(name: str, kind: str) -> None:
    expected, run = OPS[name]()(), OPS[name]()
    with GLOBALS[kind]():
        found = run()
    for one, other in zip(found, expected, strict=True):
        assert one.device == other.device
        assert_same(one, other)
