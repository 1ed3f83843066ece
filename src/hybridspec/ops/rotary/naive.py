"""Norm and rotation as their definition reads: head by head and pair by pair, in fp64."""

from __future__ import annotations

from torch import Tensor


def norm_and_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Tensor, eps: float
) -> None:
    """Norm every head, then turn the pairs (i, i + R/2) by their angles."""
    half = cos.shape[-1] // 2
    for row in range(x.shape[0]):
        for head in range(x.shape[1]):
            z = x[row, head].double()
            z = z / (z.square().mean() + eps).sqrt() * weight[head].double()
            out[row, head] = z
            for i in range(half):
                c, s = cos[row, 0, i + half].double(), sin[row, 0, i + half].double()
                out[row, head, i] = z[i] * c - z[i + half] * s
                out[row, head, i + half] = z[i + half] * c + z[i] * s
