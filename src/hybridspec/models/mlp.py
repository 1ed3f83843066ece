"""Layers that act on each row by itself: the gated MLP and the mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.models.config import ModelConfig, MoeConfig
from hybridspec.models.products import BLAS, Products
from hybridspec.ops import experts
from hybridspec.ops.activations import swiglu
from hybridspec.ops.norms import RmsNorm

__all__ = ["EXPERTS", "Mlp", "MoeMlp"]

EXPERTS = "experts"  # the op, as engines name it


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Gated MLP: down(silu(gate x) * up x); gate_up_weight [2 F, D], down_weight [D, F]."""

    gate_up_weight: Tensor
    down_weight: Tensor
    products: Products = BLAS

    def forward(self, x: Tensor) -> Tensor:
        """Return silu(gate x) * up x, [N, F], of rows [N, D]."""
        return _gated(self.products.linear(x, self.gate_up_weight))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeMlp:
    """A routed MLP with a shared expert: `ops.experts`.

    Attributes:
        config: sizes.
        router_weight: [router | gate of the shared expert] stacked, [E + 1, D].
        matrices: weights of the experts.
        meeting: see `ops.experts.norm_and_mix`; a layer works on one step at a time.
        products: how the router multiplies.
        backend: of `ops.experts.mix`; with "auto", one row alone takes one launch on a GPU.
    """

    config: MoeConfig
    router_weight: Tensor
    matrices: experts.Matrices
    meeting: Tensor
    products: Products = BLAS
    backend: str = "auto"

    @staticmethod
    def refusals(
        config: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> tuple[dict[str, str | None], dict[str, str | None]]:
        """Ask each backend of the experts why it would not serve a row; None where it would.

        Returns:
            What those of `ops.experts.mix` say, and those of `ops.experts.norm_and_mix`.
        """
        moe, size = config.moe, config.hidden_size
        assert moe is not None
        count, inner, shared = moe.num_experts, moe.expert_ffn_size, moe.shared_ffn_size

        def rows(*shape: int) -> Tensor:
            """Return a tensor of this shape that takes the memory of one row."""
            return torch.empty(shape[-1], dtype=dtype, device=device).expand(shape)

        matrices = experts.Matrices(
            rows(count, 2 * inner, size),
            rows(count, size, inner),
            rows(2 * shared, size),
            rows(size, shared),
        )
        x, per_row = rows(1, size), moe.experts_per_token
        return (
            experts.explain(x, rows(1, count + 1), matrices, x, per_row),
            experts.explain_norm_and_mix(x, x[0].float(), rows(count + 1, size), matrices, per_row),
        )

    def forward(self, x: Tensor, norm: RmsNorm) -> Tensor:
        """Return x + mixture(norm(x)), [N, D], in place of `x`."""
        options: Any = {
            "experts_per_row": self.config.experts_per_token,
            "is_normalized": self.config.is_normalized,
        }
        if x.is_cuda and self.backend == "auto":
            return experts.norm_and_mix(
                x, norm.weight, norm.eps, self.router_weight, self.matrices, meeting=self.meeting,
                **options,
            )  # fmt: skip
        y = norm.forward(x)
        scores = self.products.linear(y, self.router_weight)
        return experts.mix(y, scores, self.matrices, x, backend=self.backend, **options)


def _gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of rows [N, 2 F], the gate first; on a CPU in two operators."""
    if gate_up.is_cuda:
        return swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
