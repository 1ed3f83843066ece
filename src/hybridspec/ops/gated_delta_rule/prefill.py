"""Plain PyTorch prefill: chunks of rows, each solved at once and absorbed into the state."""

from __future__ import annotations

import torch
from torch import Tensor

from ..norms.reference import compute_dtype, gdn_gates
from .reference import absorb, delta_rows, normalise, read_state

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
) -> None:
    """Run prompts from their slots' states; see `hybridspec.ops.gated_delta_rule.prefill`."""
    dtype = compute_dtype(torch.promote_types(a.dtype, state.dtype))
    bounds = cu_seqlens.tolist()
    ratio = v.shape[1] // k.shape[1]
    out.zero_()
    for slot, first, last in zip(slots.tolist(), bounds[:-1], bounds[1:], strict=True):
        if slot < 0 or last == first:
            continue
        if int(history_len[slot]) != 0:
            raise ValueError(
                f"ring.history_len: slot {slot} has {int(history_len[slot])} live rows, expected "
                f"0 before prefill; fold() and commit() the slot first"
            )
        rows = slice(first, last)
        keys = normalise(k[rows].transpose(0, 1), dtype, use_qk_l2norm)
        queries = normalise(q[rows].transpose(0, 1), dtype, use_qk_l2norm)
        values = v[rows].transpose(0, 1).to(dtype)
        log_decay, beta = gdn_gates(a[rows].to(dtype), b[rows], A_log, dt_bias, beta_scale)
        log_decay, beta = log_decay.transpose(0, 1), beta.transpose(0, 1).unsqueeze(-1)
        wide_state = state[slot].to(dtype, copy=True)
        for begin in range(0, last - first, chunk_size):
            chunk = slice(begin, min(begin + chunk_size, last - first))
            x = torch.cat((keys[:, chunk], queries[:, chunk]), 1)
            cum = log_decay[:, chunk].cumsum(1)
            reach = cum.exp().repeat(1, 2).unsqueeze(-1)
            base = read_state(x.repeat_interleave(ratio, 0), wide_state) * reach
            u, y = delta_rows(
                x[None], values[None, :, chunk], cum[None], beta[None, :, chunk], base[None], scale
            )
            out[first + chunk.start : first + chunk.stop].copy_(y[0].transpose(0, 1))
            absorb(wide_state, u[0], keys[:, chunk], cum)
        state[slot].copy_(wide_state)
