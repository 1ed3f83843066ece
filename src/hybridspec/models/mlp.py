"""What acts on each row by itself: the plain gated MLP, and the mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.models.config import MoeConfig
from hybridspec.ops.activations import swiglu

__all__ = ["Mlp", "MoeMlp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Gated MLP: down(silu(gate x) * up x); gate_up_weight [2 F, D], down_weight [D, F]."""

    gate_up_weight: Tensor
    down_weight: Tensor

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the MLP's output, [N, D], added to `residual` if there is one."""
        y = _gated(F.linear(x, self.gate_up_weight))
        if residual is None:
            return F.linear(y, self.down_weight)
        return residual.addmm_(y, self.down_weight.t())


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeMlp:
    """A routed MLP with a shared expert.

    p = softmax(router x); w_e = p_e for the largest few, scaled to the sum of one where
    `config.is_normalized`; out = sum_e w_e expert_e(x) + sigmoid(gate x) shared(x)

    Attributes:
        config: sizes.
        router_weight: [router | gate of the shared expert] stacked, [E + 1, D].
        gate_up_weight: of every expert, [E, 2 F, D], the gate first.
        down_weight: of every expert, [E, D, F].
        shared: the expert that every row passes.
    """

    config: MoeConfig
    router_weight: Tensor
    gate_up_weight: Tensor
    down_weight: Tensor
    shared: Mlp

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the mixture's output, [N, D], added to `residual` if there is one.

        Numerics: router and experts in the dtype of `x`; probabilities and weights in fp32 (fp64),
        rounded to the dtype of `x` once; the sum over experts accumulates in fp32.
        """
        logits, gate = F.linear(x, self.router_weight).split_with_sizes(
            (self.config.num_experts, 1), -1
        )
        weights, experts = self._route(logits)
        shared = self.shared.forward(x) * gate.sigmoid()
        mixed = torch.bmm(weights.unsqueeze(1), self._experts(x, experts))
        y = shared.add_(mixed.squeeze(1))
        return y if residual is None else y.add_(residual)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [N, k] and experts [N, k] of every row."""
        wide = logits.dtype if logits.dtype is torch.float64 else torch.float32
        probs = torch.softmax(logits, -1, dtype=wide)
        weights, experts = probs.topk(self.config.experts_per_token, -1)
        if self.config.is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(logits.dtype), experts

    def _experts(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return what each row's experts make of it, [N, k, D].

        Rows are brought into the order of their experts, so that an expert's weights are read once,
        for all of its rows, and only the experts that some row needs are read at all.
        """
        num_rows, per_row = experts.shape
        of_expert, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(self.config.num_experts, device=x.device)
        ends = torch.searchsorted(of_expert, numbers, right=True, out_int32=True)
        is_at_once = x.is_cuda and x.dtype is torch.bfloat16  # all that the operator takes there
        products = _products_at_once if is_at_once else _products_one_by_one
        inputs = x.index_select(0, order.div(per_row, rounding_mode="floor"))
        gated = _gated(products(inputs, self.gate_up_weight, ends))
        out = products(gated, self.down_weight, ends)
        restored = torch.empty_like(out).index_copy_(0, order, out)
        return restored.view(num_rows, per_row, -1)


def _gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of rows [N, 2 F], the gate first; on a CPU in two operators."""
    if gate_up.is_cuda:
        return swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _products_at_once(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of x [N, in] up to ends[e] with weight[e] [out, in], for every expert e.

    Nothing of it depends on the host, but on a CPU experts without rows are not free.
    """
    return F.grouped_mm(x, weight.mT, offs=ends)


def _products_one_by_one(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same, touching only experts that have rows."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, stop in enumerate(ends.tolist()):
        if stop > start:
            torch.mm(x[start:stop], weight[expert].t(), out=out[start:stop])
            start = stop
    return out
