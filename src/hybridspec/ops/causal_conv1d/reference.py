"""Plain PyTorch form of the depthwise causal convolution: the oracle of kernels, and the CPU path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops._requests import live_requests

__all__ = ["prefill", "verify"]


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
    """Write `out` and append every row of `x` to the ring; see `api.verify`."""
    requests, num_rows = live_requests(
        cu_seqlens, slots, seq_len, max_rows=max_verify_tokens, max_name="max_verify_tokens"
    )
    if num_rows != out.shape[0]:
        out.zero_()
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    width, num_channels = weight.shape[1], weight.shape[0]
    taps = weight.t().to(dtype)
    for start, stop, slot, position in requests:
        rows = x[start:stop]
        num_new = stop - start
        window = torch.cat((_history(conv_ring[slot], position, width, dtype), rows.to(dtype)))
        windows = window.as_strided((num_new, width, num_channels), (num_channels, num_channels, 1))
        _finish((windows * taps).sum(1), bias, activation, out[start:stop])
        _append(conv_ring[slot], position, rows)


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
    """Write `out` and store the last width - 1 rows of each request; see `api.prefill`."""
    requests, num_rows = live_requests(
        cu_seqlens, slots, seq_len, max_rows=max_seqlen, max_name="max_seqlen"
    )
    if num_rows != out.shape[0]:
        out.zero_()
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    width = weight.shape[1]
    taps = weight.t().to(dtype)
    for start, stop, slot, position in requests:
        rows = x[start:stop]
        num_new = stop - start
        window = torch.cat((_history(conv_ring[slot], position, width, dtype), rows.to(dtype)))
        result = window[:num_new] * taps[0]
        for tap in range(1, width):  # one pass per tap keeps memory at [T, D], not [T, width, D]
            result.addcmul_(window[tap : tap + num_new], taps[tap])
        _finish(result, bias, activation, out[start:stop])
        num_kept = min(num_new, width - 1)
        _append(conv_ring[slot], position + num_new - num_kept, rows[num_new - num_kept :])


def _history(ring: Tensor, position: int, width: int, dtype: torch.dtype) -> Tensor:
    """The width - 1 inputs before `position`, oldest first; those before the start are zero."""
    capacity, num_channels = ring.shape
    num_zeros = max(width - 1 - position, 0)
    first, last = (position - width + 1 + num_zeros) % capacity, position % capacity
    parts = [ring[first:last]] if first <= last else [ring[first:], ring[:last]]
    if num_zeros:
        parts.insert(0, ring.new_zeros((num_zeros, num_channels)))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)


def _append(ring: Tensor, position: int, rows: Tensor) -> None:
    """Store rows at `position`, `position + 1`, ... modulo the capacity."""
    first = position % ring.shape[0]
    num_straight = min(rows.shape[0], ring.shape[0] - first)
    ring[first : first + num_straight] = rows[:num_straight]
    if num_straight < rows.shape[0]:
        ring[: rows.shape[0] - num_straight] = rows[num_straight:]


def _finish(result: Tensor, bias: Tensor | None, activation: str | None, out: Tensor) -> None:
    if bias is not None:
        result += bias
    out.copy_(F.silu(result) if activation == "silu" else result)
