"""The device side of dynamic verification: choose rows, build their parameters, compact them."""

from __future__ import annotations

from hybridspec.ops.verify_plan.api import (
    build_params,
    compact_hidden,
    compact_sampling,
    plan_step,
    select_rows,
    survival_scores,
)
from hybridspec.ops.verify_plan.entries import compact_groups, copy_page_table
from hybridspec.ops.verify_plan.sampling_columns import SamplingColumns
from hybridspec.ops.verify_plan.step import Step

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
