"""The device side of dynamic verification: choose rows, build their parameters, compact them."""

from __future__ import annotations

from .api import (
    build_params,
    compact_hidden,
    compact_sampling,
    plan_step,
    select_rows,
    survival_scores,
)
from .views import SamplingColumns, VerifyPlan

__all__ = [
    "SamplingColumns",
    "VerifyPlan",
    "build_params",
    "compact_hidden",
    "compact_sampling",
    "plan_step",
    "select_rows",
    "survival_scores",
]
