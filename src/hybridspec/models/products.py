"""Products of rows with weights: torch's, the quickest there are, or with sums in one order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops.products import cublaslt, multiply, tune
from hybridspec.ops.products.cublaslt import Case, Product

__all__ = ["BLAS", "PRODUCTS", "OrderedProducts", "Products", "TunedProducts", "products_of"]

PRODUCTS = "products"  # the op, as engines name it


class Products(Protocol):
    """Products of rows [N, D] with weights [F, D]."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T, [N, F], in the dtype of `x`."""
        ...

    def add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return residual + x W^T, rounded once; the residual may be overwritten."""
        ...

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T in fp32 (fp64 if `hidden` is)."""
        ...


class _Blas:
    """As torch multiplies; on a CPU logits are rounded to the weight's dtype and then widened."""

    linear = staticmethod(F.linear)

    def add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return residual.addmm_(x, weight.t())

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        logits = F.linear(hidden, weight)
        return logits if logits.dtype is torch.float64 else logits.float()


class TunedProducts:
    """As torch multiplies, or by the algorithm of cuBLASLt that was measured to be quicker.

    Attributes:
        found: by case, the products that have an algorithm of their own.
    """

    def __init__(self) -> None:
        self.found: dict[Case, Product] = {}

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Products`."""
        product = self.found.get(Case.of(x, weight, x.dtype, adds=False))
        if product is None or not product.takes(x):
            return BLAS.linear(x, weight)
        out = x.new_empty(x.shape[0], weight.shape[0])
        product.run(x, weight, out)
        return out

    def add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """See `Products`."""
        product = self.found.get(Case.of(x, weight, residual.dtype, adds=True))
        if product is None or not product.takes(x, residual):
            return BLAS.add(residual, x, weight)
        product.run(x, weight, residual)
        return residual

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """See `Products`."""
        product = self.found.get(Case.of(hidden, weight, torch.float32, adds=False))
        if product is None or not product.takes(hidden):
            return BLAS.logits(hidden, weight)
        out = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=torch.float32)
        product.run(hidden, weight, out)
        return out

    def tune(self, weights: Iterable[tuple[str, Tensor]], row_counts: Iterable[int]) -> None:
        """Look for the quickest algorithms.

        Args:
            weights: each with the method above that it is used by.
            row_counts: numbers of rows that captured steps have.
        """
        of_a_kind: dict[tuple[str, torch.Size], list[Tensor]] = defaultdict(list)
        for use, weight in weights:
            # The library wants rows on 16-byte boundaries for its quick algorithms.
            if Product.takes(weight) and not any(size % 8 for size in weight.shape):
                of_a_kind[use, weight.shape].append(weight)
        uses = []
        for (use, (columns, terms)), alike in of_a_kind.items():
            out_dtype = torch.float32 if use == "logits" else alike[0].dtype
            uses += [
                (
                    Case(rows, columns, terms, alike[0].dtype, out_dtype, use == "add"),
                    alike,
                    _TORCH[use],
                )
                for rows in sorted(set(row_counts))
            ]
        if uses and cublaslt.explain() is None:
            device = uses[0][1][0].device
            scratch = torch.empty(cublaslt.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self.found = tune.measured(uses, scratch)


_TORCH = {
    "linear": lambda x, weight, out: torch.mm(x, weight.t(), out=out),
    "add": lambda x, weight, out: out.addmm_(x, weight.t()),
    "logits": lambda x, weight, out: torch.mm(x, weight.t(), out_dtype=torch.float32, out=out),
}


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

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """See `Products`."""
        return multiply(hidden, weight, dtype=torch.float32, backend="triton")


BLAS: Products = _Blas()


def products_of(backend: str) -> Products:
    """Return the products that a backend names: "ordered", "tuned", or torch's for another name."""
    kinds: dict[str, type[OrderedProducts] | type[TunedProducts]] = {
        "ordered": OrderedProducts,
        "tuned": TunedProducts,
    }
    return kinds[backend]() if backend in kinds else BLAS
