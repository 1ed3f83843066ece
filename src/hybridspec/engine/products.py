"""What an engine does about products of rows with weights before it captures steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridspec.errors import UnsupportedError
from hybridspec.models import HybridModel
from hybridspec.models.mlp import MoeMlp
from hybridspec.models.products import OrderedProducts
from hybridspec.models.tuned_products import TunedProducts
from hybridspec.ops import experts
from hybridspec.ops.products import explain_order, rows_as_torch

__all__ = ["prepare_products"]


def prepare_products(model: HybridModel, row_counts: Sequence[int]) -> None:
    """Choose algorithms of products; where sums need one order, look at how the device adds up.

    Args:
        model: one that is multiplied torch's way is not looked at.
        row_counts: of captured forwards. For products in one order torch's is taken where it has
            the same bits, for others the quickest algorithm.

    Raises:
        UnsupportedError: if the bits of a row have to be, and are not, independent of other rows.
    """
    products = model.products
    if isinstance(products, TunedProducts):
        products.tune(model.matrices(), row_counts)
    elif isinstance(products, OrderedProducts):
        _check_order(model, products, row_counts)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # or what was tried on counts as memory that graphs give back


def _check_order(model: HybridModel, products: OrderedProducts, row_counts: Sequence[int]) -> None:
    """Raise UnsupportedError if the bits of a row depend on how many rows there are."""
    for shape, weight in {weight.shape: weight for _, weight in model.matrices()}.items():
        reason = explain_order(weight)
        if reason is not None:
            raise UnsupportedError(f"exact: 'bitwise' does not go with this device: {reason}")
        products.as_torch |= {(shape, count) for count in rows_as_torch(weight, row_counts)}
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeMlp)]
    reason = experts.explain_order(mixtures[0].matrices) if mixtures else None
    if reason is not None:
        raise UnsupportedError(f"exact: 'bitwise' does not go with this device: {reason}")
