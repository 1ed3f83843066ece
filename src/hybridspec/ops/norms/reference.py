"""Small pointwise and row-wise functions that layers and ops share, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["gated_rms_norm", "gdn_gates", "l2_norm", "rms_norm"]


def widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, without the call where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS-normalise the last dimension, with a weight stored as its difference from one.

    y = x / sqrt(mean(x^2) + eps) * (1 + weight)
    """
    dtype = _wide_dtype(x)
    y = F.rms_norm(widened(x, dtype), weight.shape, widened(weight, dtype) + 1.0, eps)
    return widened(y, x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS-normalise the last dimension, weigh it, and multiply with silu(gate).

    y = cast(cast(x / sqrt(mean(x^2) + eps)) * weight * silu(gate))
    """
    dtype = _wide_dtype(x)
    normed = widened(F.rms_norm(widened(x, dtype), weight.shape, None, eps), x.dtype) * weight
    return widened(normed * F.silu(widened(gate, dtype)), x.dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale the last dimension to length one.

    y = x / sqrt(sum(x^2) + eps)
    """
    wide = widened(x, _wide_dtype(x))
    inverse = torch.linalg.vecdot(wide, wide).add_(eps).rsqrt_()
    return widened(wide * inverse.unsqueeze(-1), x.dtype)


def gdn_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, beta_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute log-decay and write strength of every token and value head.

    log_decay = -exp(A_log) softplus(a + dt_bias),  beta = beta_scale sigmoid(b)
    """
    dtype = _wide_dtype(a)
    softplus = F.softplus(widened(a, dtype) + widened(dt_bias, dtype))
    beta = widened(b, dtype).sigmoid()
    if beta_scale != 1.0:
        beta = beta * beta_scale
    return softplus * widened(A_log, dtype).exp().neg_(), beta
