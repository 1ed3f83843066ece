"""On a device a row of a product has the same bits whatever rows stand beside it."""

from __future__ import annotations

import pytest
import torch

from hybridspec.ops.norms import add_rms_norm
from hybridspec.ops.products import explain_order, launch, multiply, multiply_in_parts

pytestmark = pytest.mark.gpu

# [F, D] of a model of 7.2 B: cut into two parts, into one; odd sizes.
SHAPES = [(4096, 12288), (12352, 4096), (4096, 4096), (1000, 80)]


def make(shape: tuple[int, int], rows: int = 300) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    sizes = ((rows, shape[1]), shape, (rows, shape[0]))
    return [
        torch.randn(size, generator=generator, device="cuda").to(torch.bfloat16) for size in sizes
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_do_not_depend_on_other_rows(shape: tuple[int, int]) -> None:
    x, weight, residual = make(shape)
    wide = x.double() @ weight.double().t() + residual.double()
    expected = multiply(x, weight, residual, backend="triton")
    parts = multiply_in_parts(x, weight, backend="triton")
    scale = torch.rand(shape[0], device="cuda")
    added = residual.clone()
    normed = add_rms_norm(parts, added, scale, 1e-6)
    assert torch.equal(added, expected)
    torch.testing.assert_close(expected.double(), wide, rtol=8e-3, atol=8e-3)
    for count in (1, 3, 16, 17, 64, 65, 200, 300):
        for first in (0, 300 - count):
            rows = slice(first, first + count)
            found = multiply(x[rows], weight, residual[rows], backend="triton")
            assert torch.equal(found, expected[rows])
            found = multiply_in_parts(x[rows], weight, backend="triton")
            assert torch.equal(found, parts[:, rows])
            added = residual[rows].clone()
            assert torch.equal(add_rms_norm(found, added, scale, 1e-6), normed[rows])
    assert explain_order(weight) is None


def test_a_split_that_follows_the_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight, _ = make((4096, 4096), 1)
    choose = launch.choose_launch

    def relaxed(target, rows, itemsize):
        monkeypatch.setattr(launch, "num_parts", lambda *shape: 1 if rows > 64 else 4)
        return choose(target, rows, itemsize)

    monkeypatch.setattr(launch, "choose_launch", relaxed)
    assert "differ in" in explain_order(weight)
