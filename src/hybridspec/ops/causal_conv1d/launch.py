"""Launch of the Triton kernel, which is imported then, so that this module needs no Triton."""

from __future__ import annotations

from typing import Any

import torch

from hybridspec.ops._requests import Batch
from hybridspec.ops._triton_support import explain_tensors, round_up_to_power_of_two
from hybridspec.ops.causal_conv1d.call import Log, Rows, Taps

__all__ = ["explain_prefill", "explain_verify", "prefill", "verify", "verify_bytes"]

_MAX_TOKENS = 16
_BLOCK_CHANNELS = 256
_PREFILL_ROWS = 16  # of a tile, and the most inputs that a request keeps


def explain_verify(rows: Rows, taps: Taps, log: Log, batch: Batch) -> str | None:
    """Return why the Triton kernel does not support a verify call, or None."""
    reason = _explain(rows, taps, log)
    if reason is None and batch.max_rows > _MAX_TOKENS:
        reason = f"max_verify_tokens is {batch.max_rows}, the kernel takes up to {_MAX_TOKENS}"
    return reason


def explain_prefill(rows: Rows, taps: Taps, log: Log, batch: Batch) -> str | None:
    """Return why the Triton kernel does not support a prefill call, or None."""
    reason = _explain(rows, taps, log)
    width = taps.weight.shape[1]
    if reason is None and width - 1 > _PREFILL_ROWS:
        reason = f"weight has {width} taps, the kernel takes up to {_PREFILL_ROWS + 1}"
    return reason


def _explain(rows: Rows, taps: Taps, log: Log) -> str | None:
    return explain_tensors(
        [("x", rows.x), ("weight", taps.weight), ("conv_ring", log.conv_ring), ("out", rows.out)]
    )


def verify(rows: Rows, taps: Taps, log: Log, batch: Batch) -> None:
    """Launch the verify kernel."""
    from hybridspec.ops.causal_conv1d.triton_verify import verify_kernel

    tokens = round_up_to_power_of_two(batch.max_rows)
    _launch(verify_kernel, rows, taps, log, batch, 1, TOKENS=tokens, num_warps=2)


def prefill(rows: Rows, taps: Taps, log: Log, batch: Batch) -> None:
    """Launch the prefill kernel."""
    from hybridspec.ops.causal_conv1d.triton_prefill import prefill_kernel

    tiles = max(-(-batch.max_rows // _PREFILL_ROWS), 1)
    _launch(
        prefill_kernel, rows, taps, log, batch, tiles, num_tiles=tiles, ROWS=_PREFILL_ROWS,
        num_warps=4,
    )  # fmt: skip


def _launch(
    kernel: Any, rows: Rows, taps: Taps, log: Log, batch: Batch, programs: int, **options: int
) -> None:
    """Launch so many programs for each request and block of channels."""
    (x, out), (weight, bias, activation), (conv_ring, seq_len) = rows, taps, log
    num_requests, (num_channels, width) = batch.slots.shape[0], weight.shape
    if num_requests == 0:
        out.zero_()
        return
    block = min(_BLOCK_CHANNELS, round_up_to_power_of_two(num_channels))
    with torch.cuda.device_of(x):
        kernel[(num_requests * programs * -(-num_channels // block),)](
            x, weight, bias, conv_ring, out, seq_len, batch.cu_seqlens, batch.slots, x.shape[0],
            num_requests, x.stride(0), *weight.stride(), *conv_ring.stride()[:2], out.stride(0),
            D=num_channels,
            RING=conv_ring.shape[1],
            WIDTH=width,
            BLOCK_D=block,
            IS_SILU=activation == "silu",
            enable_fp_fusion=True,
            **options,
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
