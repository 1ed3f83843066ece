"""The mixture in PyTorch operators: what runs on a CPU, and the oracle of the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops._library import Lasting, Written
from hybridspec.ops.activations import swiglu
from hybridspec.ops.experts.call import Matrices
from hybridspec.ops.norms import reference as norms

__all__ = ["gated", "mix", "mix_with", "norm_and_mix", "products_one_by_one", "route"]

# Rows of x up to ends[e], times weight[e] [out, in], for every expert e.
Products = Callable[[Tensor, Tensor, Tensor], Tensor]


def mix(
    x: Tensor,
    scores: Tensor,
    matrices: Lasting[Matrices],
    out: Written[Tensor],
    per_row: int,
    is_normalized: bool,
) -> None:
    """See `api.mix`; touches only experts that have rows, which the host has to know."""
    mix_with(products_one_by_one, x, scores, matrices, out, per_row, is_normalized)


def norm_and_mix(
    x: Written[Tensor],
    norm_weight: Tensor,
    router: Lasting[Tensor],
    matrices: Lasting[Matrices],
    meeting: Written[Tensor],
    eps: float,
    per_row: int,
    is_normalized: bool,
) -> None:
    """See `api.norm_and_mix`; nobody meets."""
    y = torch.empty_like(x)
    norms.rms_norm(x, None, norm_weight, y, eps)
    mix(y, F.linear(y, router), matrices, x, per_row, is_normalized)


def mix_with(
    products: Products,
    x: Tensor,
    scores: Tensor,
    matrices: Matrices,
    out: Tensor,
    per_row: int,
    is_normalized: bool,
) -> None:
    """Bring rows into the order of their experts, multiply, and bring the results back.

    So an expert's weights are read once, for all of its rows.
    """
    num_rows, num_experts = x.shape[0], matrices.gate_up.shape[0]
    weights, experts = route(scores[:, :num_experts], per_row, is_normalized)
    of_expert, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, device=x.device)
    ends = torch.searchsorted(of_expert, numbers, right=True, out_int32=True)
    inputs = x.index_select(0, order.div(per_row, rounding_mode="floor"))
    made = products(gated(products(inputs, matrices.gate_up, ends)), matrices.down, ends)
    mixed = torch.empty_like(made).index_copy_(0, order, made).view(num_rows, per_row, x.shape[1])
    y = torch.bmm(weights.to(x.dtype).unsqueeze(1), mixed).squeeze(1)
    shared = F.linear(gated(F.linear(x, matrices.shared_gate_up)), matrices.shared_down)
    out.add_(shared.mul_(scores[:, num_experts:].sigmoid()).add_(y))


def route(scores: Tensor, per_row: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Return weights, fp32 (fp64), and numbers of every row's experts, both [N, per_row]."""
    wide = scores.dtype if scores.dtype is torch.float64 else torch.float32
    probs = torch.softmax(scores, -1, dtype=wide)
    # A sort, because `topk` does not say which of equal scores it takes.
    experts = scores.sort(dim=-1, descending=True, stable=True).indices[:, :per_row]
    weights = probs.gather(1, experts)
    if is_normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of rows [N, 2 F], the gate first."""
    if gate_up.is_cuda:
        return swiglu(gate_up)
    # The call of an op costs a CPU as much as this arithmetic.
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def products_one_by_one(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of x [N, in] up to ends[e] with weight[e] [out, in], for every expert e."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, stop in enumerate(ends.tolist()):
        if stop > start:
            torch.mm(x[start:stop], weight[expert].t(), out=out[start:stop])
            start = stop
    return out
