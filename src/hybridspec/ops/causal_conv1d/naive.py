"""The causal convolution as its definition reads: one row and one tap after another, in fp64."""

from __future__ import annotations

import torch

from hybridspec.ops._requests import Batch
from hybridspec.ops.causal_conv1d.call import Log, Rows, Taps


def verify(rows: Rows, taps: Taps, log: Log, batch: Batch) -> None:
    """Append every row to its ring, then convolve what the ring holds."""
    capacity, width = log.conv_ring.shape[1], taps.weight.shape[1]
    rows.out.zero_()
    for b, slot in enumerate(batch.slots.tolist()):
        if slot < 0:
            continue
        position = int(log.seq_len[slot])
        for t in range(*batch.cu_seqlens[b : b + 2].tolist()):
            log.conv_ring[slot, position % capacity] = rows.x[t]
            y = torch.zeros(rows.x.shape[1]).double() if taps.bias is None else taps.bias.double()
            for j in range(width):
                p = position - width + 1 + j
                if p >= 0:
                    y = y + taps.weight[:, j].double() * log.conv_ring[slot, p % capacity].double()
            rows.out[t] = y * y.sigmoid() if taps.activation == "silu" else y
            position += 1
