"""Launch of the Triton kernel, which is imported then, so that this module needs no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._triton_support import explain_tensors, round_up_to_power_of_two

__all__ = ["add_rms_norm", "explain", "explain_add", "rms_norm"]

_MAX_SIZE = 16384
_TILE = 1024  # elements of a program, where a head is not larger


def explain(x: Tensor, gate: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> str | None:
    """Return why the Triton kernel does not support a call, or None."""
    named = [("x", x), ("weight", weight), ("out", out)]
    if gate is not None:
        named.append(("gate", gate))
    reason = explain_tensors(named)
    if reason is None and x.ndim not in (2, 3):
        reason = f"x has {x.ndim} dimensions, the kernel takes [N, D] and [N, heads, D]"
    if reason is None and x.shape[-1] > _MAX_SIZE:
        reason = f"x has rows of {x.shape[-1]}, the kernel takes up to {_MAX_SIZE}"
    return reason


def explain_add(
    parts: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float
) -> str | None:
    """Return why the Triton kernel does not support a call, or None."""
    named = {"residual": residual, "parts": parts, "weight": weight, "out": out}
    reason = explain_tensors(list(named.items()))
    if reason is None and residual.shape[1] > _MAX_SIZE:
        reason = f"residual has rows of {residual.shape[1]}, the kernel takes up to {_MAX_SIZE}"
    return reason


def add_rms_norm(parts: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """Launch the kernel; arguments as `api.add_rms_norm`."""
    from hybridspec.ops.norms.triton_norms import add_rms_norm_kernel

    num_parts, num_rows, size = parts.shape
    if residual.numel() == 0:
        return
    block = round_up_to_power_of_two(size)
    with torch.cuda.device_of(residual):
        add_rms_norm_kernel[(num_rows,)](
            parts, residual, weight, out, eps, *parts.stride()[:2], residual.stride(0),
            out.stride(0),
            PARTS=num_parts,
            D=size,
            BLOCK_D=block,
            num_warps=min(max(block // 512, 1), 16),
            enable_fp_fusion=True,
        )  # fmt: skip


def rms_norm(x: Tensor, gate: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """Launch the kernel; arguments as `api.rms_norm` and `api.gated_rms_norm`."""
    from hybridspec.ops.norms.triton_norms import rms_norm_kernel

    if x.numel() == 0:
        return
    if x.ndim == 2:
        x, out = x.unsqueeze(1), out.unsqueeze(1)
        gate = None if gate is None else gate.unsqueeze(1)
    num_rows, num_heads, size = x.shape
    block_d = round_up_to_power_of_two(size)
    block_h = min(max(_TILE // block_d, 1), round_up_to_power_of_two(num_heads))
    with torch.cuda.device_of(x):
        rms_norm_kernel[(num_rows, -(-num_heads // block_h))](
            x, gate, weight, out, eps, num_heads, *x.stride()[:2],
            *((0, 0) if gate is None else gate.stride()[:2]),
            weight.stride(0) if weight.ndim == 2 else 0, *out.stride()[:2],
            D=size,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=min(max(block_h * block_d // 512, 1), 16),
            enable_fp_fusion=True,
        )  # fmt: skip
