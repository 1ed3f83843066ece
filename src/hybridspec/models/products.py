"""Products of rows with weights: torch's, or with sums in one order."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops.norms import RmsNorm, add_rms_norm
from hybridspec.ops.products import multiply, multiply_in_parts

__all__ = ["BLAS", "PRODUCTS", "OrderedProducts", "Products"]

PRODUCTS = "products"  # the op, as engines name it


class Products(Protocol):
    """Products of rows [N, D] with weights [F, D]."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T, [N, F], in the dtype of `x`."""
        ...

    def add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return residual + x W^T, rounded once; the residual may be overwritten."""
        ...

    def add_and_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, norm: RmsNorm
    ) -> tuple[Tensor, Tensor]:
        """Return what `add` does, and its norm."""
        ...

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T in fp32 (fp64 if `hidden` is)."""
        ...


class _Blas:
    """As torch multiplies; on a CPU logits are rounded to the weight's dtype and then widened."""

    linear = staticmethod(F.linear)

    def add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return residual.addmm_(x, weight.t())

    def add_and_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, norm: RmsNorm
    ) -> tuple[Tensor, Tensor]:
        added = self.add(residual, x, weight)
        return added, norm.forward(added)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        logits = F.linear(hidden, weight)
        return logits if logits.dtype is torch.float64 else logits.float()


class OrderedProducts:
    """As `hybridspec.ops.products` multiplies: a row's bits do not depend on other rows.

    Attributes:
        as_torch: shapes of weights and numbers of rows for which torch's product was seen to have
            the same bits; it is quicker for many rows.
    """

    def __init__(self) -> None:
        self.as_torch: set[tuple[torch.Size, int]] = set()

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Products`."""
        if (weight.shape, x.shape[0]) in self.as_torch:
            return F.linear(x, weight)
        return multiply(x, weight, backend="triton")

    def add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """See `Products`."""
        return multiply(x, weight, residual, backend="triton")

    def add_and_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, norm: RmsNorm
    ) -> tuple[Tensor, Tensor]:
        """See `Products`; the norm's launch adds the parts of the sum."""
        parts = multiply_in_parts(x, weight, backend="triton")
        normed = add_rms_norm(parts, residual, norm.weight, norm.eps, backend="triton")
        return residual, normed

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """See `Products`."""
        return multiply(hidden, weight, dtype=torch.float32, backend="triton")


BLAS: Products = _Blas()
