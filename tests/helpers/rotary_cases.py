"""Heads to norm and rotate, and what is right for them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridspec.ops.rotary import naive, norm_and_rotate

__all__ = ["CASES", "EPS", "check_kernel", "expected", "make_heads"]

# (rows, heads, D, R)
CASES = {
    "qwen": (3, 18, 256, 64),
    "all rotated": (2, 3, 64, 64),
    "nothing rotated": (2, 2, 32, 0),
    "odd sizes": (5, 7, 96, 24),
    "no rows": (0, 2, 32, 8),
}
EPS = 1e-6


def make_heads(
    case: tuple[int, int, int, int],
    dtype: torch.dtype,
    *,
    wide: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, cos, sin: views with NaN around them, of different strides."""
    num_rows, num_heads, head_dim, rotary = case
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def surrounded(values: Tensor, dtype: torch.dtype, gap: int) -> Tensor:
        sizes = values.shape[1:]
        wide = torch.full((len(values), *(n + 2 * gap for n in sizes)), math.nan, dtype=dtype)
        part = wide.to(device)[(slice(None), *(slice(gap, gap + n) for n in sizes))]
        return part.copy_(values)

    x = 3 * random(num_rows, num_heads, head_dim)
    angles = 10 * random(num_rows, 1, rotary // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    weight = random(num_heads, head_dim)
    return (
        surrounded(x, dtype, 16),
        surrounded(weight, wide, 8),
        surrounded(cos, wide, 4),
        surrounded(sin, wide, 12),
    )


def expected(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The right output, by the definition, in fp64 on a CPU."""
    out = torch.empty(x.shape, dtype=torch.float64)
    naive.norm_and_rotate(*(tensor.cpu() for tensor in (x, weight, cos, sin)), out, EPS)
    return out


def check_kernel(name: str, dtype: torch.dtype, device: str, bound: float) -> None:
    """Run the kernel into a strided buffer and compare with the loop."""
    heads = make_heads(CASES[name], dtype, device=device)
    x = heads[0]
    buffer = torch.full((*x.shape[:2], x.shape[2] + 8), math.nan, dtype=dtype, device=device)
    out = norm_and_rotate(*heads, eps=EPS, out=buffer[..., :-8], backend="triton")
    right = expected(*heads)
    scale = right.abs().max() if right.numel() else 1.0
    torch.testing.assert_close(out.double().cpu(), right, rtol=0, atol=bound * float(scale))
    assert buffer[..., -8:].isnan().all()
