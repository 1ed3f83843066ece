"""Small pointwise and row-wise functions that layers and ops share, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["gated_rms_norm", "gdn_gates", "l2_norm", "rms_norm"]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for everything but fp64, which stays."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS-normalise the last dimension, with a weight stored as its difference from one.

    y = x / sqrt(mean(x^2) + eps) * (1 + weight)
    """
    wide = x.to(compute_dtype(x.dtype))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse * (1.0 + weight.to(wide.dtype))).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS-normalise the last dimension, weigh it, and multiply with silu(gate).

    y = cast(x / sqrt(mean(x^2) + eps)) * weight * silu(gate)
    """
    wide = x.to(compute_dtype(x.dtype))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (wide * inverse).to(x.dtype) * weight
    return (normed * F.silu(gate.to(wide.dtype))).to(x.dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale the last dimension to length one.

    y = x / sqrt(sum(x^2) + eps)
    """
    wide = x.to(compute_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def gdn_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, beta_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute log-decay and write strength of every token and value head.

    log_decay = -exp(A_log) softplus(a + dt_bias),  beta = beta_scale sigmoid(b)
    """
    dtype = compute_dtype(a.dtype)
    log_decay = A_log.to(dtype).exp().neg() * F.softplus(a.to(dtype) + dt_bias.to(dtype))
    beta = b.to(dtype).sigmoid()
    return log_decay, beta if beta_scale == 1.0 else beta * beta_scale
