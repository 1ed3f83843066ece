"""The mixture of experts of a layer: router, routed experts and the shared one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.models.config import MoeConfig
from hybridspec.models.mlp import MoeMlp
from hybridspec.ops.experts import Matrices
from hybridspec.ops.norms import RmsNorm


def make_moe(
    num_experts: int,
    per_token: int,
    *,
    is_normalized: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> MoeMlp:
    """Random experts."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return MoeMlp(
        config=MoeConfig(
            num_experts=num_experts,
            experts_per_token=per_token,
            expert_ffn_size=8,
            shared_ffn_size=10,
            is_normalized=is_normalized,
        ),
        router_weight=matrix(num_experts + 1, 8),
        matrices=Matrices(
            gate_up=matrix(num_experts, 16, 8),
            down=matrix(num_experts, 8, 8),
            shared_gate_up=matrix(20, 8),
            shared_down=matrix(8, 10),
        ),
        meeting=torch.zeros(2, dtype=torch.int32),
    )


def expected(moe: MoeMlp, x: Tensor) -> Tensor:
    """One row and one expert at a time, in the words of the equation."""
    c, m = moe.config, moe.matrices
    out = torch.zeros_like(x)
    for i, row in enumerate(x):
        scores = moe.router_weight @ row
        probs = scores[:-1].softmax(-1)
        chosen = sorted(range(c.num_experts), key=lambda e: -probs[e].item())
        chosen = chosen[: c.experts_per_token]
        total = sum(probs[e] for e in chosen) if c.is_normalized else 1.0
        for e in chosen:
            gate, up = m.gate_up[e, :8] @ row, m.gate_up[e, 8:] @ row
            out[i] += probs[e] / total * (m.down[e] @ (F.silu(gate) * up))
        gate, up = (m.shared_gate_up @ row).chunk(2)
        out[i] += scores[-1].sigmoid() * (m.shared_down @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize(("num_experts", "per_token"), [(1, 1), (6, 2), (7, 7)])
def test_mixture(num_experts: int, per_token: int, is_normalized: bool) -> None:
    moe = make_moe(num_experts, per_token, is_normalized=is_normalized)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 8, generator=generator, dtype=torch.float64)
    norm = RmsNorm(torch.rand(8, generator=generator, dtype=torch.float64), 1e-6)
    right = x + expected(moe, norm.forward(x))
    out = moe.forward(x, norm)
    assert out is x
    torch.testing.assert_close(out, right, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("spoil", ["router_weight", *Matrices._fields])
def test_teeth_every_matrix_counts(spoil: str) -> None:
    moe, other = make_moe(4, 4), make_moe(4, 4)
    (other.router_weight if spoil == "router_weight" else getattr(other.matrices, spoil))[2] += 0.1
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    norm = RmsNorm(torch.ones(8, dtype=torch.float64), 0.0)
    wrong = x + expected(other, norm.forward(x))
    assert (moe.forward(x, norm) - wrong).abs().max() > 1e-3
