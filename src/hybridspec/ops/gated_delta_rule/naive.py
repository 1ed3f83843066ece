"""The gated delta rule as its definition reads: one token after another, in fp64."""

from __future__ import annotations

from torch import einsum
from torch.nn.functional import softplus

from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.ring.view import RingView


def verify(rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch) -> None:
    """Read the window, fold it where marked, then run the new rows and append them."""
    ratio, capacity = rows.v.shape[1] // rows.k.shape[1], ring.k.shape[2]
    rows.out.zero_()
    none = gates.A_log.double().mul(0)
    for b, slot in enumerate(batch.slots.tolist()):  # type: ignore[union-attr]
        first, last = batch.cu_seqlens[b : b + 2].tolist()  # type: ignore[index]
        if slot < 0:
            continue
        row, S, G = int(ring.ring_start[slot]), state.values[slot].double(), none  # type: ignore[index]
        for _ in range(int(ring.history_len[slot])):
            k, u, cum = (log[slot, :, row % capacity].double() for log in ring[:3])
            S = (cum if ring.has_token_decay else cum - G).exp()[:, None, None] * S
            S = S + einsum("hv,hk->hvk", u, k.repeat_interleave(ratio, 0))
            row, G = row + 1, cum
        if batch.is_fold is not None and batch.is_fold[b]:
            state.values[slot], G = S, none
        for t in range(first, last):
            q, k, v, a, b_t = (part[t].double() for part in rows[:5])
            if gates.use_qk_l2norm:
                q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            wide_q, wide_k = (x.repeat_interleave(ratio, 0) for x in (q, k))
            g = -gates.A_log.double().exp() * softplus(a + gates.dt_bias.double())
            S = g.exp()[:, None, None] * S
            u = gates.beta_scale * b_t.sigmoid()[:, None] * (v - einsum("hvk,hk->hv", S, wide_k))
            S = S + einsum("hv,hk->hvk", u, wide_k)
            rows.out[t] = einsum("hvk,hk->hv", S, wide_q) * gates.output_scale(q.shape[1])
            at, row, G = row % capacity, row + 1, G + g
            ring.k[slot, :, at], ring.u[slot, :, at] = k, u
            ring.cum_log_decay[slot, :, at] = g if ring.has_token_decay else G
