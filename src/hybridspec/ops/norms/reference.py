"""Small pointwise functions that layers and ops share, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops._autocast import without_autocast
from hybridspec.ops._library import Written

__all__ = ["add_rms_norm", "gdn_gates", "rms_norm", "widened"]


def widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, without the call where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, out: Written[Tensor], eps: float
) -> None:
    """See `api.rms_norm` and, with a gate, `api.gated_rms_norm`."""
    y = F.rms_norm(widened(x, weight.dtype), weight.shape[-1:], None, eps) * weight
    if gate is not None:
        y = y * F.silu(widened(gate, weight.dtype))
    out.copy_(y)


def add_rms_norm(
    parts: Tensor,
    residual: Written[Tensor],
    weight: Tensor,
    out: Written[Tensor],
    eps: float,
) -> None:
    """See `api.add_rms_norm`."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    residual.copy_(total + residual)
    rms_norm(residual, None, weight, out, eps)


@without_autocast
def gdn_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, beta_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute log-decay and write strength of every token and value head.

    log_decay = -exp(A_log) softplus(a + dt_bias),  beta = beta_scale sigmoid(b)

    Args:
        a: [..., HV], any float dtype; in.
        b: [..., HV], any float dtype; in.
        A_log: [HV]; in.
        dt_bias: [HV]; in.
        beta_scale: 2 lets the state have negative eigenvalues.

    Returns:
        log_decay and beta, [..., HV], fp32 (fp64 if `a` is).

    Numerics:
        In the dtype of the result; softplus(x) is x above 20.

    Source:
        Gated Delta Networks (Yang et al. 2025, arXiv:2412.06464), section 3.4, with the gate of
        Mamba2 (Dao and Gu 2024, arXiv:2405.21060).
    """
    dtype = _wide_dtype(a)
    softplus = F.softplus(widened(a, dtype) + widened(dt_bias, dtype))
    beta = widened(b, dtype).sigmoid()
    if beta_scale != 1.0:
        beta = beta * beta_scale
    return softplus * widened(A_log, dtype).exp().neg_(), beta
