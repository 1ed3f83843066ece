"""Products of rows with a weight, added up in an order that does not depend on the rows."""

from __future__ import annotations

from hybridspec.ops.products.api import explain_multiply, multiply, multiply_in_parts
from hybridspec.ops.products.order import explain_order, rows_as_torch

__all__ = ["explain_multiply", "explain_order", "multiply", "multiply_in_parts", "rows_as_torch"]
