"""Which implementation serves a call: one order of preference for all callers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

from torch import Tensor

from hybridspec.ops._backends import Supports, always
from hybridspec.ops.gated_delta_rule import fla, launch, launch_cuda

__all__ = ["prefill_backends", "verify_backends"]

_logger = logging.getLogger("hybridspec")

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


def prefill_backends(anchor: Tensor) -> Mapping[str, Supports]:
    """Candidates in order, each saying of (q, ..., dt_bias, state, slots, out, C) why it cannot.

    Args:
        anchor: a tensor of the call; its device decides the order.
    """
    if anchor.is_cuda:
        return {"fla": _explain_and_warn, "reference": always}
    return {"reference": always, "fla": fla.explain}


def _explain_and_warn(*args: object) -> str | None:
    reason = fla.explain(*args)
    if reason is not None:
        _warn_once(reason)
    return reason


@functools.cache
def _warn_once(reason: str) -> None:
    _logger.warning("prompts of Gated DeltaNet layers run in plain PyTorch, slowly: %s", reason)
