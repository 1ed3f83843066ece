"""The semantics of flash-linear-attention's `chunk_gated_delta_rule` in plain PyTorch.

Written from the function's documentation and its kernels' use of the list of chunks: a chunk that
is listed out of order is read from a wrong state, one that is missing stays NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["fake_chunk_gated_delta_rule"]

_SEEN: list[Tensor] = []


def fake_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence, chunk by chunk as they are listed."""
    assert all(seen is not cu_seqlens for seen in _SEEN)  # it would go by its former values
    _SEEN.append(cu_seqlens)
    assert output_final_state and state_v_first and initial_state.dtype == torch.float32
    assert all(x.is_contiguous() and x.shape[0] == 1 for x in (q, k, v, g, beta))
    ratio, bounds = v.shape[2] // q.shape[2], cu_seqlens.tolist()
    out, final = torch.full_like(v, math.nan), initial_state.clone()
    wide = [x[0].float() for x in (q, k, v, g, beta)]
    due = [(b, t) for b in range(len(bounds) - 1) for t in range(bounds[b], bounds[b + 1])]
    for request, number in chunk_indices.tolist():
        first = bounds[request] + number * chunk_size
        for row in range(first, min(first + chunk_size, bounds[request + 1])):
            assert due.pop(0) == (request, row)
            query, key, value, decay, strength = (x[row] for x in wide)
            key, query = key.repeat_interleave(ratio, 0), query.repeat_interleave(ratio, 0)
            state = final[request] * decay.exp()[:, None, None]
            u = strength[:, None] * (value - torch.einsum("hvk,hk->hv", state, key))
            final[request] = state + u[:, :, None] * key[:, None, :]
            y = torch.einsum("hvk,hk->hv", final[request], query) * scale
            out[0, row] = y.to(out.dtype)
    return out, final
