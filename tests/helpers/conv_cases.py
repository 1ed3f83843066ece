"""Ragged batches for the causal convolution and a loop over rows and taps that says what is right.

Every number that an op must not read is NaN: padding rows, ring rows outside the last width - 1
positions, and the memory around the strided views.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ConvBatch", "expected_output", "expected_ring", "make_conv_batch"]


@dataclass(frozen=True, kw_only=True)
class ConvBatch:
    """The tensors of one call, and `history`: all inputs of each request before it."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    conv_ring: Tensor
    seq_len: Tensor
    cu_seqlens: Tensor
    slots: Tensor
    history: list[Tensor]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The positional arguments of the ops."""
        return (
            self.x, self.weight, self.conv_ring, self.seq_len, self.cu_seqlens, self.slots
        )  # fmt: skip

    @property
    def longest(self) -> int:
        bounds = self.cu_seqlens.tolist()
        return max((b - a for a, b in zip(bounds, bounds[1:], strict=False)), default=0)

    def requests(self) -> list[tuple[int, int, int]]:
        """(start, stop, slot) of every request."""
        bounds = self.cu_seqlens.tolist()
        return list(zip(bounds, bounds[1:], self.slots.tolist(), strict=False))


def make_conv_batch(
    lengths: list[int],
    positions: list[int],
    slots: list[int],
    *,
    num_slots: int = 6,
    capacity: int = 16,
    width: int = 4,
    num_channels: int = 5,
    tail_rows: int = 0,
    has_bias: bool = False,
    dtype: torch.dtype = torch.float64,
    ring_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> ConvBatch:
    """Build a batch whose x, ring and weight are strided views of larger allocations."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    x = torch.full((bounds[-1] + tail_rows, num_channels + 7), math.nan, dtype=dtype)[:, 3:-4]
    ring_dtype = ring_dtype or dtype
    ring = torch.full((num_slots, 2, capacity + 1, num_channels + 2), math.nan, dtype=ring_dtype)
    ring = ring[:, 1, :capacity, 1:-1]
    seq_len = torch.full((num_slots,), 10**6, dtype=torch.int32)
    history = []
    for index, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        past = random(position, num_channels).to(ring_dtype)
        history.append(past)
        if slot < 0:
            continue
        x[bounds[index] : bounds[index + 1]] = random(lengths[index], num_channels).to(dtype)
        seq_len[slot] = position
        for p in range(max(position - width + 1, 0), position):
            ring[slot, p % capacity] = past[p]
    return ConvBatch(
        x=x,
        weight=random(width, num_channels).to(dtype).t(),
        bias=random(num_channels).to(dtype) if has_bias else None,
        conv_ring=ring,
        seq_len=seq_len,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
        history=history,
    )


def expected_output(batch: ConvBatch, activation: str | None = "silu") -> Tensor:
    """The right output in fp64, one row and one tap at a time."""
    weight = batch.weight.double()
    width = weight.shape[1]
    out = torch.zeros(batch.x.shape, dtype=torch.float64)
    for (start, stop, slot), past in zip(batch.requests(), batch.history, strict=True):
        if slot < 0:
            continue
        inputs = [*past, *batch.x[start:stop].to(batch.conv_ring.dtype)]
        for row in range(start, stop):
            position = len(past) + row - start
            for tap in range(width):
                source = position - width + 1 + tap
                if source >= 0:
                    out[row] += weight[:, tap] * inputs[source].double()
            if batch.bias is not None:
                out[row] += batch.bias.double()
            if activation == "silu":
                out[row] = out[row] / (1 + torch.exp(-out[row]))
    return out


def expected_ring(batch: ConvBatch, *, num_kept: int | None = None) -> Tensor:
    """The right ring: each request's last `num_kept` rows are stored, all rows if None."""
    ring = batch.conv_ring.clone()
    for (start, stop, slot), past in zip(batch.requests(), batch.history, strict=True):
        if slot < 0:
            continue
        first = start if num_kept is None else max(start, stop - num_kept)
        for row in range(first, stop):
            ring[slot, (len(past) + row - start) % ring.shape[1]] = batch.x[row]
    return ring
