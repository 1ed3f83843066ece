"""Attention of one drafting step from every slot of a window at once.

Slot i of step s attends to the step-0 keys of slots 0..i and to the keys of its own chain. The
first part is causal attention; the second joins it through the log-sum-exp. A flash backward pass
needs nothing but the final output and the final log-sum-exp, so the same kernel also serves the
joint softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChainKeys:
    """Keys and values of step 0 (`k`, `v`) and of each later step, all `[B, H, T, D]`."""

    k: Tensor
    v: Tensor
    own_k: tuple[Tensor, ...]
    own_v: tuple[Tensor, ...]

    def extended(self, k: Tensor, v: Tensor) -> ChainKeys:
        """With one more step's keys and values."""
        return ChainKeys(self.k, self.v, (*self.own_k, k), (*self.own_v, v))


def chain_attention(q: Tensor, keys: ChainKeys) -> Tensor:
    """softmax over {step-0 keys j ≤ i} ∪ {own keys of slot i}, scale D^-0.5; out `[B, H, T, D]`.

    Flash attention where it exists (16-bit on CUDA), the plain formula elsewhere.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return flash_chain_attention(q, keys)
    num_tokens, scale = q.shape[-2], q.shape[-1] ** -0.5
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).triu(1)
    causal = (q @ keys.k.mT * scale).masked_fill(hidden, -torch.inf)
    own = [(q * k).sum(-1, keepdim=True) * scale for k in keys.own_k]
    weights = torch.cat((causal, *own), dim=-1).softmax(-1)
    out = weights[..., :num_tokens] @ keys.v
    for j, v in enumerate(keys.own_v):
        out = out + weights[..., num_tokens + j, None] * v
    return out


def flash_chain_attention(q: Tensor, keys: ChainKeys) -> Tensor:
    """`chain_attention` through the flash kernels of the device."""
    return _FlashChain.apply(q, keys.k, keys.v, *keys.own_k, *keys.own_v)


def merge(
    q: Tensor, out: Tensor, lse: Tensor, own_k: list[Tensor], own_v: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Joins causal attention (`out`, `lse`) with the own keys: new output and log-sum-exp."""
    q, scale = q.float(), q.shape[-1] ** -0.5
    own = [(q * k.float()).sum(-1) * scale for k in own_k]
    total = torch.logsumexp(torch.stack((lse, *own)), dim=0)
    merged = out.float() * (lse - total).exp()[..., None]
    for score, v in zip(own, own_v, strict=True):
        merged = merged + (score - total).exp()[..., None] * v.float()
    return merged.to(out.dtype), total


def own_gradients(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    grad_q: Tensor,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Adds the own keys' share to `grad_q` and gives the gradients of own keys and values."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    grad, q, grad_q = grad.float(), q.float(), grad_q.float()
    mean = (grad * out.float()).sum(-1)
    grad_k, grad_v = [], []
    for k, v in zip(own_k, own_v, strict=True):
        k, v = k.float(), v.float()
        weight = ((q * k).sum(-1) * scale - lse).exp()
        grad_score = (weight * ((grad * v).sum(-1) - mean) * scale)[..., None]
        grad_q = grad_q + grad_score * k
        grad_k.append((grad_score * q).to(dtype))
        grad_v.append((weight[..., None] * grad).to(dtype))
    return grad_q.to(dtype), grad_k, grad_v


FUNCTIONS = {"merge": merge, "own_gradients": own_gradients}


def compile_functions() -> None:
    """Compiles the elementwise parts around the flash kernels."""
    FUNCTIONS.update({n: torch.compile(f, dynamic=False) for n, f in FUNCTIONS.items()})


class _FlashChain(torch.autograd.Function):
    """Causal flash attention joined with own keys; see the module's description."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        """Flash forward, then the join."""
        own_k, own_v = list(own[: len(own) // 2]), list(own[len(own) // 2 :])
        if q.is_cuda:
            out, lse, *ctx.extra = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, True
            )
        else:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, True
            )
        lse = lse[..., : q.shape[-2]]
        if own:
            out, lse = FUNCTIONS["merge"](q, out, lse, own_k, own_v)
        ctx.save_for_backward(q, k, v, out, lse, *own)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        """Flash backward with the joint output and log-sum-exp, then the own keys."""
        q, k, v, out, lse, *own = ctx.saved_tensors
        own_k, own_v = own[: len(own) // 2], own[len(own) // 2 :]
        grad = grad.contiguous()
        if q.is_cuda:
            cum_q, cum_k, max_q, max_k, seed, offset, _ = ctx.extra
            grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
            )
        else:
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, True
            )
        grad_q, grad_k, grad_v = grads
        grad_own_k, grad_own_v = [], []
        if own:
            grad_q, grad_own_k, grad_own_v = FUNCTIONS["own_gradients"](
                grad, q, out, lse, own_k, own_v, grad_q
            )
        return grad_q, grad_k, grad_v, *grad_own_k, *grad_own_v
