"""Rows to norm and to gate as strided views, and the equations in fp64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridspec.ops import activations
from hybridspec.ops.norms import add_rms_norm, gated_rms_norm, rms_norm

__all__ = [
    "CASES",
    "EPS",
    "GATE_CASES",
    "check_add",
    "check_gates",
    "check_norms",
    "expected",
    "expected_gates",
    "make_gates",
    "make_norm",
    "surrounded",
]

EPS = 1e-6
# shape of the rows, then of the weight
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "rows": ((3, 64), (64,)),
    "wide rows": ((2, 2560), (2560,)),
    "odd rows": ((5, 96), (96,)),
    "one weight for all heads": ((3, 18, 128), (128,)),
    "heads": ((4, 7, 48), (7, 48)),
    "no rows": ((0, 2, 32), (2, 32)),
}
# rows, row size
GATE_CASES = {"row": (1, 64), "wide": (3, 2500), "odd": (5, 33), "no rows": (0, 8)}


def surrounded(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Random numbers with NaN around each of the last dimensions."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    wide = torch.full((shape[0], *(n + 16 for n in shape[1:])), math.nan, dtype=dtype).to(device)
    part = wide[(slice(None), *(slice(8, 8 + n) for n in shape[1:]))]
    return part.copy_(values)


def make_norm(
    case: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    *,
    wide: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """x, gate and weight of a case."""
    shape, weight_shape = case
    x, gate = (surrounded(shape, dtype, device, seed) for seed in (0, 1))
    weight = surrounded((1, *weight_shape), wide, device, 2)[0]
    return x, gate, weight


def expected(x: Tensor, gate: Tensor | None, weight: Tensor) -> Tensor:
    """The right norm in fp64."""
    x, weight = x.double().cpu(), weight.double().cpu()
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight
    if gate is None:
        return y
    gate = gate.double().cpu()
    return y * gate / (1.0 + torch.exp(-gate))


def check_norms(name: str, dtype: torch.dtype, device: str, bound: float) -> None:
    """Run the kernel with and without a gate, into strided buffers, and compare."""
    x, gate, weight = make_norm(CASES[name], dtype, device=device)
    for is_gated in (False, True):
        buffer = torch.full((*x.shape[:-1], x.shape[-1] + 8), math.nan, dtype=dtype, device=device)
        out = buffer[..., :-8]
        if is_gated:
            gated_rms_norm(x, gate, weight, EPS, out=out, backend="triton")
        else:
            rms_norm(x, weight, EPS, out=out, backend="triton")
        right = expected(x, gate if is_gated else None, weight)
        torch.testing.assert_close(out.double().cpu(), right, rtol=bound, atol=bound)
        assert buffer[..., -8:].isnan().all()


def make_gates(
    case: tuple[int, int], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """gate_up [N, 2 F], y [N, F] and its gate [N, F]."""
    num_rows, size = case
    gate_up = surrounded((num_rows, 2 * size), dtype, device, 0)
    y, gate = (surrounded((num_rows, size), dtype, device, seed) for seed in (1, 2))
    return gate_up, y, gate


def expected_gates(gate_up: Tensor, y: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The right swiglu(gate_up) and sigmoid_gate(y, gate) in fp64."""
    gate_up, y, gate = (tensor.double().cpu() for tensor in (gate_up, y, gate))
    first, up = gate_up.chunk(2, 1)
    return first / (1.0 + torch.exp(-first)) * up, y / (1.0 + torch.exp(-gate))


def check_gates(name: str, dtype: torch.dtype, device: str, bound: float) -> None:
    """Run the kernel both ways, the second in place, and compare."""
    gate_up, y, gate = make_gates(GATE_CASES[name], dtype, device)
    right = expected_gates(gate_up, y, gate)
    found = activations.swiglu(gate_up, backend="triton")
    activations.sigmoid_gate(y, gate, out=y, backend="triton")
    for mine, theirs in zip((found, y), right, strict=True):
        torch.testing.assert_close(mine.double().cpu(), theirs, rtol=bound, atol=bound)
    if len(y):
        assert y._base[:, :8].isnan().all() and y._base[:, -8:].isnan().all()


def check_add(num_parts: int, size: int, dtype: torch.dtype, device: str, bound: float) -> None:
    """Compare the sum of parts and its norm with fp64; the sum is rounded before it is normed."""
    generator = torch.Generator().manual_seed(num_parts)
    drawn = [
        torch.randn(shape, generator=generator) for shape in ((num_parts, 5, size + 3), (size,))
    ]
    room = torch.randn(5, 2 * size, generator=generator).to(dtype).to(device)
    parts, weight = (one.to(device) for one in drawn)
    parts, residual = parts[..., :size], room[:, size:]
    right = (parts.double().sum(0) + residual.double()).to(dtype)
    left = room[:, :size].clone()
    out = torch.full((5, size), torch.nan, dtype=dtype, device=device)
    assert add_rms_norm(parts, residual, weight, EPS, out=out, backend="triton") is out
    torch.testing.assert_close(residual.double(), right.double(), rtol=bound, atol=bound)
    assert torch.equal(room[:, :size], left)
    normed = expected(residual, None, weight)
    torch.testing.assert_close(out.double().cpu(), normed, rtol=bound, atol=bound)
