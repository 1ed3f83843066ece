"""Prefill in PyTorch operators: chunks of rows, each solved at once and absorbed into the state."""

from __future__ import annotations

from functools import partial

import torch

from hybridspec.ops._library import Written
from hybridspec.ops._requests import check_distinct, check_lengths, read_batch
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.cpu import (
    absorb,
    compute_dtype,
    delta_rows,
    normalise_,
    read_state,
)
from hybridspec.ops.gated_delta_rule.int8_state import quantise, widen
from hybridspec.ops.norms.reference import gdn_gates, widened
from hybridspec.ops.ring.view import RingView

__all__ = ["prefill"]


def prefill(
    rows: Written[Rows],
    gates: Gates,
    state: Written[State],
    ring: RingView,
    batch: FoldingBatch,
    chunk_size: int,
) -> None:
    """Run prompts from their slots' states; see `hybridspec.ops.gated_delta_rule.prefill`."""
    q, k, v, a, b, out = rows
    values, factors = state
    assert batch.cu_seqlens is not None and batch.slots is not None
    dtype = compute_dtype(q, a, values)
    bounds, numbers = read_batch(
        batch.cu_seqlens, batch.slots, num_rows=q.shape[0], num_slots=values.shape[0]
    )
    check_lengths("max_seqlen", batch.max_rows, bounds)
    live = ring.history_len.tolist()
    spans = zip(numbers, bounds[:-1], bounds[1:], strict=True)
    requests = [span for span in spans if span[0] >= 0 and span[2] > span[1]]
    check_distinct([slot for slot, _, _ in requests])
    for slot, _, _ in requests:  # before any state is written
        if live[slot]:
            raise ValueError(
                f"ring.history_len: expected 0 in slot {slot} before prefill, got {live[slot]}; "
                f"fold the slot and commit first"
            )
    out.zero_()
    scale = gates.output_scale(k.shape[2])
    for slot, first, last in requests:
        if factors is None:
            checkpoint = values[slot].to(dtype, copy=True)
        else:
            checkpoint = widen(values[slot], factors[slot], dtype)
        for begin in range(first, last, chunk_size):
            chunk = slice(begin, min(begin + chunk_size, last))
            x = torch.cat((k[chunk].transpose(0, 1), q[chunk].transpose(0, 1)), 1)
            x = widened(x, dtype)
            if gates.use_qk_l2norm:
                normalise_(x)
            log_decay, beta = gdn_gates(
                widened(a[chunk], dtype), b[chunk], gates.A_log, gates.dt_bias, gates.beta_scale
            )
            cum = log_decay.mT.cumsum(1)
            new = widened(v[chunk].transpose(0, 1), dtype)
            keys = x[:, : cum.shape[1]]
            read = partial(read_state, state=checkpoint)
            u, y = delta_rows(x, keys, new, cum, cum, beta.mT, None, read, scale)
            out[chunk].copy_(y.transpose(0, 1))
            absorb(checkpoint, keys, u, cum)
        if factors is None:
            values[slot].copy_(checkpoint)
        else:
            quantise(checkpoint, values[slot], factors[slot])
