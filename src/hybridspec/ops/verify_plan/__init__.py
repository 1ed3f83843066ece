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
from .groups import compact_groups, copy_page_table
from .step import Step
from .views import SamplingColumns

__all__ = [
    "SamplingColumns",
    "Step",
    "build_params",
    "compact_groups",
    "compact_hidden",
    "compact_sampling",
    "copy_page_table",
    "plan_step",
    "select_rows",
    "survival_scores",
]
