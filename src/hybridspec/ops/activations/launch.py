"""Launch of the Triton kernel, which is imported then, so that this module needs no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._triton_support import explain_tensors, round_up_to_power_of_two

__all__ = ["explain", "gated"]

_BLOCK = 1024


def explain(x: Tensor, gate: Tensor, out: Tensor, is_silu: bool) -> str | None:
    """Return why the Triton kernel does not support a call, or None."""
    return explain_tensors([("x", x), ("gate", gate), ("out", out)])


def gated(x: Tensor, gate: Tensor, out: Tensor, is_silu: bool) -> None:
    """Launch the kernel; arguments as `reference.gated`."""
    from hybridspec.ops.activations.triton_gate import gate_kernel

    num_rows, size = x.shape
    if x.numel() == 0:
        return
    block = min(_BLOCK, round_up_to_power_of_two(size))
    with torch.cuda.device_of(x):
        gate_kernel[(num_rows, -(-size // block))](
            x, gate, out, size, x.stride(0), gate.stride(0), out.stride(0),
            BLOCK=block,
            IS_SILU=is_silu,
            num_warps=max(block // 256, 1),
            enable_fp_fusion=True,
        )  # fmt: skip
