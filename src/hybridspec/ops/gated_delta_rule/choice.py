"""Which implementation serves a verify call: one order of preference for all callers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hybridspec.ops._backends import Supports, always
from hybridspec.ops.gated_delta_rule import launch, launch_cuda

__all__ = ["verify_backends"]

_ON_DEVICE: dict[str, Supports] = {
    "cuda": launch_cuda.explain_verify,
    "triton": launch.explain_verify,
    "reference": always,
}
_ON_CPU: dict[str, Supports] = {"reference": always, **_ON_DEVICE}


def verify_backends(anchor: Tensor) -> Mapping[str, Supports]:
    """Candidates in order, each saying of (q, k, v, a, b, state, ring, out, T) why it cannot.

    Args:
        anchor: a tensor of the call; its device decides the order.
    """
    return _ON_DEVICE if anchor.is_cuda else _ON_CPU
