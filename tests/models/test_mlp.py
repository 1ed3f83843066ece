"""The mixture of experts against a loop over rows and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridspec.models import mlp as mlp_module
from hybridspec.models.config import MoeConfig
from hybridspec.models.mlp import Mlp, MoeMlp


def make_moe(
    num_experts: int,
    per_token: int,
    *,
    is_normalized: bool = True,
    has_columns: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> MoeMlp:
    """Random experts; `has_columns` stores matrices column by column, as on a CPU."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        full = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        return full.mT.contiguous().mT if has_columns else full

    return MoeMlp(
        config=MoeConfig(
            num_experts=num_experts,
            experts_per_token=per_token,
            expert_ffn_size=8,
            shared_ffn_size=10,
            is_normalized=is_normalized,
        ),
        router_weight=matrix(num_experts + 1, 8),
        gate_up_weight=matrix(num_experts, 16, 8),
        down_weight=matrix(num_experts, 8, 8),
        shared=Mlp(gate_up_weight=matrix(20, 8), down_weight=matrix(8, 10)),
    )


def expected(moe: MoeMlp, x: Tensor) -> Tensor:
    """One row and one expert at a time, in the words of the equation."""
    c = moe.config
    out = torch.zeros_like(x)
    for i, row in enumerate(x):
        scores = moe.router_weight @ row
        probs = scores[:-1].softmax(-1)
        chosen = sorted(range(c.num_experts), key=lambda e: -probs[e].item())
        chosen = chosen[: c.experts_per_token]
        total = sum(probs[e] for e in chosen) if c.is_normalized else 1.0
        for e in chosen:
            gate, up = moe.gate_up_weight[e, :8] @ row, moe.gate_up_weight[e, 8:] @ row
            out[i] += probs[e] / total * (moe.down_weight[e] @ (F.silu(gate) * up))
        gate, up = (moe.shared.gate_up_weight @ row).chunk(2)
        out[i] += scores[-1].sigmoid() * (moe.shared.down_weight @ (F.silu(gate) * up))
    return out


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 9),
    num_experts=st.integers(1, 7),
    data=st.data(),
    is_normalized=st.booleans(),
    has_columns=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_mixture(
    num_rows: int,
    num_experts: int,
    data: Any,
    is_normalized: bool,
    has_columns: bool,
    seed: int,
) -> None:
    per_token = data.draw(st.integers(1, num_experts))
    moe = make_moe(
        num_experts, per_token, is_normalized=is_normalized, has_columns=has_columns, seed=seed
    )
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 8, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(moe.forward(x), expected(moe, x), atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("has_columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_at_once_and_one_by_one_agree(has_columns: bool, dtype: torch.dtype) -> None:
    moe = make_moe(5, 2, has_columns=has_columns, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, 8, generator=generator).to(dtype)
    ends = torch.tensor([0, 4, 4, 10, 11], dtype=torch.int32)  # experts 0 and 2 have no rows
    at_once = mlp_module._products_at_once(x, moe.gate_up_weight, ends)
    one_by_one = mlp_module._products_one_by_one(x, moe.gate_up_weight, ends)
    assert at_once.dtype is one_by_one.dtype is dtype
    torch.testing.assert_close(at_once, one_by_one, atol=1e-6, rtol=1e-2)
    right = torch.cat((x[:4] @ moe.gate_up_weight[1].t(), x[4:10] @ moe.gate_up_weight[3].t()))
    torch.testing.assert_close(one_by_one[:10], right, atol=1e-6, rtol=1e-2)


def test_narrow_weights_are_rounded_once() -> None:
    moe, wide = make_moe(6, 3, dtype=torch.bfloat16), make_moe(6, 3, dtype=torch.bfloat16)
    wide = MoeMlp(
        config=wide.config,
        router_weight=wide.router_weight.double(),
        gate_up_weight=wide.gate_up_weight.double(),
        down_weight=wide.down_weight.double(),
        shared=Mlp(
            gate_up_weight=wide.shared.gate_up_weight.double(),
            down_weight=wide.shared.down_weight.double(),
        ),
    )
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    out, right = moe.forward(x), wide.forward(x.double())
    assert out.dtype is torch.bfloat16
    assert (out.double() - right).norm() < 0.02 * right.norm()


@pytest.mark.parametrize("spoil", ["router_weight", "gate_up_weight", "down_weight"])
def test_teeth_every_matrix_counts(spoil: str) -> None:
    moe, other = make_moe(4, 4), make_moe(4, 4)
    getattr(other, spoil)[2] += 0.1
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert (moe.forward(x) - expected(other, x)).abs().max() > 1e-3
