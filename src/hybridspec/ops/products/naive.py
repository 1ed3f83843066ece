"""A product of rows with a weight as its definition reads: one term after another, in fp64."""

from __future__ import annotations

from torch import Tensor


def multiply(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """Write x W^T, and the residual on top."""
    for row in range(x.shape[0]):
        total = weight.new_zeros(weight.shape[0]).double()
        for i in range(x.shape[1]):
            total = total + x[row, i].double() * weight[:, i].double()
        out[row] = total if residual is None else total + residual[row].double()
