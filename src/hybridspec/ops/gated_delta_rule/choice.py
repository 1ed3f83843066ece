"""Which implementation serves a verify call: one order of preference for all callers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hybridspec.ops._backends import Supports
from hybridspec.ops._triton_support import triton_or_reference
from hybridspec.ops.gated_delta_rule import launch, launch_cuda

__all__ = ["verify_backends"]

_portable = triton_or_reference(launch.explain_verify)


def verify_backends(anchor: Tensor) -> Mapping[str, Supports]:
    """Candidates in order, each saying of (q, k, v, a, b, state, ring, out, T) why it cannot.

    Args:
        anchor: a tensor of the call; its device decides the order.
    """
    portable = _portable(anchor)
    cuda = {"cuda": launch_cuda.explain_verify}
    return {**cuda, **portable} if anchor.is_cuda else {**portable, **cuda}
