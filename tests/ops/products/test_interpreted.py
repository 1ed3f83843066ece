"""The kernels against fp64 in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from hybridspec.ops.norms import add_rms_norm, rms_norm
from hybridspec.ops.products import launch, multiply_in_parts
from hybridspec.ops.products.launch import LaunchConfig

pytestmark = pytest.mark.interpreted

SHAPES = {"4 parts": (100, 4096), "1 part": (80, 96), "odd": (33, 50)}


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_kernel(name: str, has_residual: bool) -> None:
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    x, weight, residual = (
        torch.randn(size, generator=generator) for size in ((37, shape[1]), shape, (37, shape[0]))
    )
    config = LaunchConfig(block_m=16, block_n=64, block_k=32, num_stages=2, num_warps=4)
    expected = x.double() @ weight.double().t() + residual.double() * has_residual
    for count in (1, 37):
        out = torch.full((count, shape[0]), torch.nan)
        launch.multiply(x[:count], weight, residual[:count] if has_residual else None, out, config)
        torch.testing.assert_close(out.double(), expected[:count], rtol=1e-4, atol=1e-4)
    assert launch.explain(x, weight, None, out) is None


@pytest.mark.parametrize("name", SHAPES)
def test_parts_and_the_norm_that_adds_them(name: str) -> None:
    """As a layer does it whose sums have one order: what the residual becomes has the same bits."""
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(1)
    x, weight, residual, scale = (
        torch.randn(size, generator=generator)
        for size in ((5, shape[1]), shape, (5, shape[0]), (shape[0],))
    )
    expected = torch.empty_like(residual)
    launch.multiply(x, weight, residual, expected)
    parts = multiply_in_parts(x, weight, backend="triton")
    assert parts.shape == (launch.num_parts(*shape), 5, shape[0])
    normed = add_rms_norm(parts, residual, scale, 1e-6, backend="triton")
    assert torch.equal(residual, expected)
    right = rms_norm(expected, scale, 1e-6, backend="reference")
    torch.testing.assert_close(normed, right, rtol=1e-5, atol=1e-5)
