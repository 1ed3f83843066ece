"""Which backend each op takes in an engine, and why, found by asking the ops themselves."""

from __future__ import annotations

import torch

from hybridspec.ops.causal_conv1d import launch as conv_launch
from hybridspec.ops.gated_delta_rule import launch as gdn_launch
from hybridspec.runtime import Pools

__all__ = ["backends_in_use"]


def backends_in_use(pools: Pools) -> dict[str, tuple[str, str]]:
    """Name the backend of each op for the tensors of these pools, with the reason."""
    chosen = {}
    if pools.gdn:
        chosen["gated_delta_rule"] = _named(_explain_gdn(pools))
        chosen["causal_conv1d"] = _named(_explain_conv(pools))
    for op in ("paged_attention", "sampling"):
        chosen[op] = ("reference", "plain PyTorch, the only backend of this op")
    return chosen


def _named(reason: str | None) -> tuple[str, str]:
    if reason is None:
        return "triton", "serves this device, these dtypes and sizes"
    return "reference", f"plain PyTorch; not Triton: {reason}"


def _explain_gdn(pools: Pools) -> str | None:
    g, pool = pools.geometry, pools.gdn[0]
    q = torch.empty(1, g.num_key_heads, g.key_dim, dtype=pools.dtype, device=pools.device)
    out = torch.empty(1, g.num_value_heads, g.value_dim, dtype=pools.dtype, device=pools.device)
    gate = out[:, :, 0]
    return gdn_launch.explain_verify(q, gate, gate, pool.state, pool.ring, out, 1)


def _explain_conv(pools: Pools) -> str | None:
    ring = pools.gdn[0].conv_ring
    x = torch.empty(1, ring.shape[2], dtype=pools.dtype, device=pools.device)
    weight = torch.empty(
        ring.shape[2], pools.geometry.conv_width, dtype=pools.dtype, device=pools.device
    )
    return conv_launch.explain_verify(x, weight, ring, x, 1)
