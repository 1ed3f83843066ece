"""The depthwise causal convolution in PyTorch operators: what a CPU runs.

Inputs enter the sum as the ring stores them, also in the step that appends them. A step of four
rows and four steps of one row therefore see the same numbers, whatever the dtype of the ring.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops._library import Lasting, Written
from hybridspec.ops._requests import Batch, live_requests
from hybridspec.ops.causal_conv1d.call import Log, Rows, Taps
from hybridspec.ops.norms.reference import widened

__all__ = ["prefill", "verify"]


def verify(
    rows: Written[Rows],
    taps: Lasting[Taps],
    log: Lasting[Written[Log]],
    batch: Lasting[Batch],
) -> None:
    """Append every row of `x` to its ring and write `out`; see `api.verify`."""
    x, out = rows
    requests = live_requests(batch, log.seq_len, num_rows=x.shape[0], max_name="max_verify_tokens")
    num_channels, width = taps.weight.shape
    dtype = _compute_dtype(x)
    pieces: list[Tensor] = []
    firsts: list[int] = []
    indices: list[int] = []
    height = 0
    for start, stop, slot, position in requests:
        ring = log.conv_ring[slot]
        _append(ring, position, x if stop - start == x.shape[0] else x[start:stop])
        pieces += _read(ring, position - width + 1, position + stop - start)
        firsts += range(height, height + stop - start)
        indices += range(start, stop)
        height += width - 1 + stop - start
    if len(indices) != out.shape[0]:
        out.zero_()
    if not indices:
        return

    inputs = widened(torch.cat(pieces) if len(pieces) > 1 else pieces[0], dtype)
    stride = inputs.stride(0)
    windows = inputs.as_strided(
        (height - width + 1, width, num_channels), (stride, stride, 1), inputs.storage_offset()
    )
    if len(requests) > 1:  # windows that reach from one request into the next are left behind
        windows = windows.index_select(0, torch.tensor(firsts, device=x.device))
    # out is written at once where that rounds no earlier than the end
    is_direct = len(indices) == out.shape[0] and out.dtype == dtype
    products = windows * _columns(taps.weight, dtype)
    result = torch.sum(products, 1, out=out) if is_direct else products.sum(1)
    _finish(result, taps)
    if is_direct:
        return
    if len(indices) == out.shape[0]:
        out.copy_(result)
    else:
        out[torch.tensor(indices, device=x.device)] = result.to(out.dtype)


def prefill(rows: Written[Rows], taps: Taps, log: Written[Log], batch: Batch) -> None:
    """Write `out` and store the last width - 1 rows of each request; see `api.prefill`."""
    x, out = rows
    requests = live_requests(batch, log.seq_len, num_rows=x.shape[0], max_name="max_seqlen")
    if sum(stop - start for start, stop, _, _ in requests) != out.shape[0]:
        out.zero_()
    width = taps.weight.shape[1]
    dtype = _compute_dtype(x)
    columns = _columns(taps.weight, dtype)
    for start, stop, slot, position in requests:
        ring = log.conv_ring[slot]
        num_new = stop - start
        fresh = x[start:stop].to(ring.dtype)
        inputs = torch.cat([*_read(ring, position - width + 1, position), fresh]).to(dtype)
        result = inputs[:num_new] * columns[0]
        for tap in range(1, width):  # one pass per tap keeps memory at [T, D], not [T, width, D]
            result.addcmul_(inputs[tap : tap + num_new], columns[tap])
        _finish(result, taps)
        out[start:stop] = result
        num_kept = min(num_new, width - 1)
        _append(ring, position + num_new - num_kept, fresh[num_new - num_kept :])


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _columns(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights as [width, D], the channels side by side."""
    return widened(weight.t(), dtype).contiguous()


def _append(ring: Tensor, position: int, rows: Tensor) -> None:
    """Store rows at `position`, `position + 1`, ... modulo the capacity."""
    capacity, num_rows = ring.shape[0], rows.shape[0]
    first = position % capacity
    num_wrapped = max(first + num_rows - capacity, 0)
    if num_wrapped:
        ring[:num_wrapped] = rows[num_rows - num_wrapped :]
        rows = rows[: num_rows - num_wrapped]
    ring[first : first + num_rows] = rows


def _read(ring: Tensor, first: int, stop: int) -> list[Tensor]:
    """Inputs of positions `first` to `stop - 1` in pieces; zeros stand for negative positions."""
    pieces = []
    if first < 0:
        pieces.append(ring.new_zeros(-first, ring.shape[1]))
        first = 0
    begin = first % ring.shape[0]
    end = begin + stop - first
    pieces.append(ring[begin:end])
    if end > ring.shape[0]:
        pieces.append(ring[: end - ring.shape[0]])
    return pieces


def _finish(result: Tensor, taps: Taps) -> None:
    """Add the bias and apply the activation, in place."""
    if taps.bias is not None:
        result += taps.bias
    if taps.activation == "silu":
        F.silu(result, inplace=True)
