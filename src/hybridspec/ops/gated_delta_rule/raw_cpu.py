"""The raw ring in PyTorch operators: the window and the step's rows as one chunk from a checkpoint.

What `prefill` does with a chunk of a prompt, except that rows of the window come from the ring,
and that the state takes in no more than the window, and only where the request folds.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec.ops._library import Lasting, Written
from hybridspec.ops._requests import check_distinct, check_lengths, check_slots, read_at
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.cpu import (
    absorb,
    compute_dtype,
    delta_rows,
    normalise_,
    read_state,
)
from hybridspec.ops.norms.reference import gdn_gates, widened
from hybridspec.ops.ring.addressing import append_rows, live_rows
from hybridspec.ops.ring.view import RawRingView

__all__ = ["verify"]


class _Request(NamedTuple):
    """Packed rows `first` to `last - 1`, behind `history` live rows from ring row `start` on."""

    slot: int
    first: int
    last: int
    start: int
    history: int
    is_fold: bool


def verify(
    rows: Written[Rows], gates: Lasting[Gates], state: Lasting[Written[State]],
    ring: Lasting[Written[RawRingView]], batch: Lasting[FoldingBatch],
) -> None:  # fmt: skip
    """Check T_b rows of each request; see `hybridspec.ops.gated_delta_rule.verify_raw`."""
    requests = _read(rows, state, ring, batch)
    results = torch.empty_like(rows.out) if batch.keeps_padding else rows.out.zero_()
    for request in requests:
        _verify_one(rows._replace(out=results), gates, state.values, ring, request)
        if batch.keeps_padding:
            mine = slice(request.first, request.last)
            rows.out[mine].copy_(results[mine])


def _read(rows: Rows, state: State, ring: RawRingView, batch: FoldingBatch) -> list[_Request]:
    """Read whose the rows are, on the host; those who have neither rows nor a fold are left out."""
    count = batch.num_requests(ring)
    slots = list(range(count)) if batch.slots is None else batch.slots.tolist()
    check_slots("slots", slots, state.values.shape[0])
    if batch.cu_seqlens is None:
        bounds = [batch.max_rows * i for i in range(count + 1)]
        starts, lengths = ring.ring_start.tolist(), ring.history_len.tolist()
    else:
        bounds = batch.cu_seqlens.tolist()
        check_lengths("max_verify_tokens", batch.max_rows, bounds)
        named = [max(slot, 0) for slot in slots]
        starts, lengths = read_at(ring.ring_start, named), read_at(ring.history_len, named)
    if batch.is_fold is not None:
        flags = batch.is_fold.tolist()
    else:
        threshold = batch.fold_threshold
        flags = [threshold is not None and n >= threshold for n in lengths]
    found = []
    for i, slot in enumerate(slots):
        if slot <= max(batch.padding, -1) or (bounds[i] == bounds[i + 1] and not flags[i]):
            continue
        capacity = ring.k.shape[2]
        if not 0 <= starts[i] < capacity:
            raise ValueError(
                f"ring.ring_start: expected a row below {capacity} in slot {slot}, got {starts[i]}"
            )
        if not 0 <= lengths[i] <= ring.max_window:
            raise ValueError(
                f"ring.history_len: expected 0..{ring.max_window} live rows in slot {slot}, "
                f"got {lengths[i]}"
            )
        found.append(
            _Request(slot, bounds[i], bounds[i + 1], starts[i], lengths[i], bool(flags[i]))
        )
    check_distinct([request.slot for request in found])
    return found


def _verify_one(
    rows: Rows, gates: Gates, values: Tensor, ring: RawRingView, request: _Request
) -> None:
    slot, first, last, start, history, is_fold = request
    num_tokens = last - first
    if num_tokens + history == 0:
        return
    dtype = compute_dtype(rows.q, rows.a, values)
    new = [part[first:last].transpose(0, 1) for part in rows[1:5]]
    k, v, a, b = (
        torch.cat((live_rows(log, [slot], [start], [history], dtype), widened(part, dtype)), 1)
        for log, part in zip(ring[:4], new, strict=True)
    )
    q = torch.zeros_like(k)  # no queries of the window
    q[:, history:] = rows.q[first:last].transpose(0, 1)
    x = torch.cat((k, q), 1)
    if gates.use_qk_l2norm:
        normalise_(x)
    keys = x[:, : k.shape[1]]
    log_decay, beta = gdn_gates(a.mT, b.mT, gates.A_log, gates.dt_bias, gates.beta_scale)
    cum, checkpoint = log_decay.mT.cumsum(1), values[slot]
    u, y = delta_rows(
        x, keys, v, cum, cum, beta.mT, None, partial(read_state, state=checkpoint),
        gates.output_scale(k.shape[2]),
    )  # fmt: skip
    if num_tokens:
        rows.out[first:last].copy_(y[:, history:].transpose(0, 1))
        at = [(start + history) % ring.k.shape[2]]
        for log, part in zip(ring[:4], new, strict=True):
            append_rows(log, part, [slot], at, [num_tokens])
    if is_fold:
        absorb(checkpoint, keys[:, :history], u[:, :history], cum[:, :history])
