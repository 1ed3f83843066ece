"""How the Triton kernel is launched; it is imported only when it is, so this needs no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._triton_support import explain_tensors, round_up_to_power_of_two

__all__ = ["explain_prefill", "explain_verify", "prefill", "verify", "verify_bytes"]

_MAX_TOKENS = 16
_BLOCK_CHANNELS = 256
_PREFILL_ROWS = 16  # of a tile, and the most inputs that a request keeps


def explain_verify(
    x: Tensor,
    weight: Tensor,
    conv_ring: Tensor,
    out: Tensor,
    max_verify_tokens: int,
) -> str | None:
    """Say why the Triton kernel cannot serve a verify call, or return None."""
    reason = explain_tensors([("x", x), ("weight", weight), ("conv_ring", conv_ring), ("out", out)])
    if reason is None and max_verify_tokens > _MAX_TOKENS:
        reason = f"max_verify_tokens is {max_verify_tokens}, the kernel takes up to {_MAX_TOKENS}"
    return reason


def verify(
    x: Tensor,
    weight: Tensor,
    conv_ring: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    max_verify_tokens: int,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor,
) -> None:
    """Launch the verify kernel; arguments as `api.verify`."""
    from hybridspec.ops.causal_conv1d.triton_verify import verify_kernel

    num_requests, (num_channels, width) = slots.shape[0], weight.shape
    if num_requests == 0:
        out.zero_()
        return
    block = min(_BLOCK_CHANNELS, round_up_to_power_of_two(num_channels))
    with torch.cuda.device_of(x):
        verify_kernel[(num_requests * -(-num_channels // block),)](
            x, weight, bias, conv_ring, out, seq_len, cu_seqlens, slots, x.shape[0], num_requests,
            x.stride(0), *weight.stride(), *conv_ring.stride()[:2], out.stride(0),
            D=num_channels,
            RING=conv_ring.shape[1],
            WIDTH=width,
            TOKENS=round_up_to_power_of_two(max_verify_tokens),
            BLOCK_D=block,
            IS_SILU=activation == "silu",
            num_warps=2,
            enable_fp_fusion=True,
        )  # fmt: skip


def explain_prefill(
    x: Tensor, weight: Tensor, conv_ring: Tensor, out: Tensor, max_seqlen: int
) -> str | None:
    """Say why the Triton kernel cannot serve a prefill call, or return None."""
    reason = explain_tensors([("x", x), ("weight", weight), ("conv_ring", conv_ring), ("out", out)])
    if reason is None and weight.shape[1] - 1 > _PREFILL_ROWS:
        reason = f"weight has {weight.shape[1]} taps, the kernel takes up to {_PREFILL_ROWS + 1}"
    return reason


def prefill(
    x: Tensor,
    weight: Tensor,
    conv_ring: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    max_seqlen: int,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor,
) -> None:
    """Launch the prefill kernel; arguments as `api.prefill`."""
    from hybridspec.ops.causal_conv1d.triton_prefill import prefill_kernel

    num_requests, (num_channels, width) = slots.shape[0], weight.shape
    if num_requests == 0:
        out.zero_()
        return
    block = min(_BLOCK_CHANNELS, round_up_to_power_of_two(num_channels))
    num_tiles = max(-(-max_seqlen // _PREFILL_ROWS), 1)
    with torch.cuda.device_of(x):
        prefill_kernel[(num_requests * num_tiles * -(-num_channels // block),)](
            x, weight, bias, conv_ring, out, seq_len, cu_seqlens, slots, x.shape[0], num_requests,
            num_tiles, x.stride(0), *weight.stride(), *conv_ring.stride()[:2], out.stride(0),
            D=num_channels,
            RING=conv_ring.shape[1],
            WIDTH=width,
            ROWS=_PREFILL_ROWS,
            BLOCK_D=block,
            IS_SILU=activation == "silu",
            num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip


def verify_bytes(num_tokens: list[int], num_channels: int, width: int, itemsize: int) -> int:
    """Count the bytes that one verify step must move: tail read, rows read, written, appended.

    Args:
        num_tokens: new rows of each request.
        num_channels: D.
        width: taps of the convolution.
        itemsize: bytes of an element of x, the ring and the output.
    """
    rows = sum(width - 1 + 3 * new for new in num_tokens)
    return (rows + width) * num_channels * itemsize
