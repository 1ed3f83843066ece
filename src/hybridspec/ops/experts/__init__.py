"""A mixture of experts: routing, the experts that rows need, their weighted sum."""

from __future__ import annotations

from hybridspec.ops.experts.api import explain, explain_norm_and_mix, mix, norm_and_mix
from hybridspec.ops.experts.call import Matrices
from hybridspec.ops.experts.order import explain_order

__all__ = ["Matrices", "explain", "explain_norm_and_mix", "explain_order", "mix", "norm_and_mix"]
