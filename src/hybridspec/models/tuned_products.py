"""Products by the algorithms of cuBLASLt that were measured to be quicker than torch's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hybridspec.models.products import BLAS
from hybridspec.ops.norms import RmsNorm, add_rms_norm
from hybridspec.ops.products import cublaslt, tune
from hybridspec.ops.products.cublaslt import Case, Product

__all__ = ["TunedProducts"]

_PARTS = (1, 2, 4)  # that the terms of a sum may be cut into, where a norm follows
_FEWEST_TERMS = 1024  # of a part


class TunedProducts:
    """As torch multiplies, or by the algorithm of cuBLASLt that was measured to be quicker.

    Where a norm follows, the sum may be left in parts, which the norm's launch then adds up.

    Attributes:
        found: by name of the method, rows and shape of the weight: products that have an algorithm
            of their own.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, int, int], Product] = {}

    def _product(self, use: str, x: Tensor, weight: Tensor, *others: Tensor) -> Product | None:
        product = self.found.get((use, x.shape[0], *weight.shape))
        return product if product is not None and product.takes(x, *others) else None

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Products`."""
        product = self._product("linear", x, weight)
        if product is None:
            return BLAS.linear(x, weight)
        out = x.new_empty(x.shape[0], weight.shape[0])
        product.run(x, weight, out)
        return out

    def add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """See `Products`."""
        product = self._product("add", x, weight, residual)
        if product is None:
            return BLAS.add(residual, x, weight)
        product.run(x, weight, residual)
        return residual

    def add_and_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, norm: RmsNorm
    ) -> tuple[Tensor, Tensor]:
        """See `Products`."""
        product = self._product("add_and_norm", x, weight, residual)
        if product is None:
            return BLAS.add_and_norm(residual, x, weight, norm)
        return _add_and_norm(product, residual, x, weight, norm)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """See `Products`."""
        product = self._product("logits", hidden, weight)
        if product is None:
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
        alike: dict[tuple[str, int, int], list[Tensor]] = defaultdict(list)
        for use, weight in weights:
            # The library wants rows on 16-byte boundaries for its quick algorithms.
            if Product.takes(weight) and not any(size % 8 for size in weight.shape):
                alike[use, weight.shape[0], weight.shape[1]].append(weight)
        if not alike or cublaslt.explain() is not None:
            return
        counts, device = sorted(set(row_counts)), next(iter(alike.values()))[0].device
        scratch = torch.empty(cublaslt.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        uses = {
            (name, rows, columns, terms): _use(name, rows, some)
            for (name, columns, terms), some in alike.items()
            for rows in counts
        }
        found = zip(uses, tune.measured(list(uses.values()), scratch), strict=True)
        self.found = {key: product for key, product in found if product is not None}


def _add_and_norm(
    product: Product, residual: Tensor, x: Tensor, weight: Tensor, norm: RmsNorm
) -> tuple[Tensor, Tensor]:
    """Add a product to rows, at once or in parts, and norm them."""
    case = product.case
    if case.adds:
        product.run(x, weight, residual)
        return residual, norm.forward(residual)
    parts = residual.new_empty(case.parts, *residual.shape, dtype=torch.float32)
    product.run(x, weight, parts)
    return residual, add_rms_norm(parts, residual, norm.weight, norm.eps)


def _use(name: str, rows: int, weights: list[Tensor]) -> tune.Use:
    """Describe what a method does with a number of rows."""
    (columns, terms), dtype = weights[0].shape, weights[0].dtype
    case = Case(rows, columns, terms, dtype, dtype)
    if name != "add_and_norm":
        case = case._replace(
            out_dtype=torch.float32 if name == "logits" else dtype, adds=name == "add"
        )
        return tune.Use([case], weights, _TORCH[name], lambda product: product.run, case.out_dtype)
    norm = RmsNorm(torch.ones(columns, device=weights[0].device), 1e-6)

    def with_torch(x: Tensor, weight: Tensor, out: Tensor) -> None:
        BLAS.add_and_norm(out, x, weight, norm)

    def with_product(product: Product) -> tune.Run:
        def run(x: Tensor, weight: Tensor, out: Tensor) -> None:
            _add_and_norm(product, out, x, weight, norm)

        return run

    cases = [case._replace(adds=True)]
    cases += [
        case._replace(out_dtype=torch.float32, parts=parts)
        for parts in _PARTS
        if terms % (parts * 128) == 0 and (parts == 1 or terms // parts >= _FEWEST_TERMS)
    ]
    return tune.Use(cases, weights, with_torch, with_product, dtype)


_TORCH: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "linear": lambda x, weight, out: torch.mm(x, weight.t(), out=out),
    "add": lambda x, weight, out: BLAS.add(out, x, weight),
    "logits": lambda x, weight, out: torch.mm(x, weight.t(), out_dtype=torch.float32, out=out),
}
