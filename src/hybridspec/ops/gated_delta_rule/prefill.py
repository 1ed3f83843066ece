"""Plain PyTorch prefill: chunks of rows, each solved at once and absorbed into the state."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hybridspec.ops._requests import check_distinct, check_lengths, read_batch
from hybridspec.ops.gated_delta_rule.int8_state import quantise, widen
from hybridspec.ops.gated_delta_rule.reference import (
    absorb,
    compute_dtype,
    delta_rows,
    normalise_,
    read_state,
)
from hybridspec.ops.norms.reference import gdn_gates, widened

__all__ = ["prefill"]


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    history_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    out: Tensor,
    scale: float,
    use_qk_l2norm: bool,
    beta_scale: float,
    chunk_size: int,
    max_seqlen: int,
    state_scale: Tensor | None = None,
) -> None:
    """Run prompts from their slots' states; see `hybridspec.ops.gated_delta_rule.prefill`."""
    dtype = compute_dtype(q, a, state)
    bounds, numbers = read_batch(cu_seqlens, slots, num_rows=q.shape[0], num_slots=state.shape[0])
    check_lengths("max_seqlen", max_seqlen, bounds)
    live = history_len.tolist()
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
    for slot, first, last in requests:
        if state_scale is None:
            checkpoint = state[slot].to(dtype, copy=True)
        else:
            checkpoint = widen(state[slot], state_scale[slot], dtype)
        for begin in range(first, last, chunk_size):
            chunk = slice(begin, min(begin + chunk_size, last))
            x = torch.cat((k[chunk].transpose(0, 1), q[chunk].transpose(0, 1)), 1)
            x = widened(x, dtype)
            if use_qk_l2norm:
                normalise_(x)
            gates = gdn_gates(widened(a[chunk], dtype), b[chunk], A_log, dt_bias, beta_scale)
            cum, beta = gates[0].mT.cumsum(1), gates[1].mT
            values = widened(v[chunk].transpose(0, 1), dtype)
            keys = x[:, : cum.shape[1]]
            read = partial(read_state, state=checkpoint)
            u, y = delta_rows(x, keys, values, cum, cum, beta, None, read, scale)
            out[chunk].copy_(y.transpose(0, 1))
            absorb(checkpoint, keys, u, cum)
        if state_scale is None:
            state[slot].copy_(checkpoint)
        else:
            quantise(checkpoint, state[slot], state_scale[slot])
