"""The kernel against the oracle in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.far_memory import far_apart
from helpers.rotary_cases import CASES, EPS, check_kernel, make_heads
from helpers.tolerances import assert_same
from hybridspec.ops.rotary import launch, norm_and_rotate

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str) -> None:
    check_kernel(name, torch.float32, "cpu", 1e-6)


def test_16_bits() -> None:
    check_kernel("odd sizes", torch.float16, "cpu", 1e-3)


def test_rows_past_two_to_the_31st_element(tmp_path: Path) -> None:
    x, *rest = make_heads((3, 2, 32, 8), torch.float16)
    far = [far_apart(x, 3, 2**30, tmp_path / name) for name in ("x", "out")]
    far[0].copy_(x)
    norm_and_rotate(far[0], *rest, eps=EPS, out=far[1], backend="triton")
    assert_same(far[1], norm_and_rotate(x, *rest, eps=EPS, backend="triton"))


@pytest.mark.parametrize(
    ("head_dim", "wide", "reason"),
    [
        (1024, torch.float32, None),
        (1026, torch.float32, "the head size is 1026, the kernel takes up to 1024"),
        (32, torch.float64, "weight has dtype float64"),
    ],
)
def test_what_it_refuses(head_dim: int, wide: torch.dtype, reason: str | None) -> None:
    heads = make_heads((1, 2, head_dim, 8), torch.float32, wide=wide)
    assert launch.explain(*heads, heads[0], EPS) == reason
