"""The gated delta rule over a raw ring as its definition reads: row after row, in fp64."""

from __future__ import annotations

from torch import Tensor, einsum
from torch.nn.functional import softplus

from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.ring.view import RawRingView


def verify(rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch) -> None:
    """Run the window, fold it where marked, then run the new rows and append them as they are."""
    ratio, capacity = rows.v.shape[1] // rows.k.shape[1], ring.k.shape[2]
    rows.out.zero_()

    def advanced(S: Tensor, *row: Tensor) -> Tensor:
        """Return the state after a row k [H, K], v [HV, V], a and b [HV]."""
        k, v, a, b = (part.double() for part in row)
        if gates.use_qk_l2norm:
            k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        k = k.repeat_interleave(ratio, 0)
        g = -gates.A_log.double().exp() * softplus(a + gates.dt_bias.double())
        S = g.exp()[:, None, None] * S
        u = gates.beta_scale * b.sigmoid()[:, None] * (v - einsum("hvk,hk->hv", S, k))
        return S + einsum("hv,hk->hvk", u, k)

    for i, slot in enumerate(batch.slots.tolist()):  # type: ignore[union-attr]
        first, last = batch.cu_seqlens[i : i + 2].tolist()  # type: ignore[index]
        if slot < 0:
            continue
        row, S = int(ring.ring_start[slot]), state.values[slot].double()
        for _ in range(int(ring.history_len[slot])):
            S = advanced(S, *(log[slot, :, row % capacity] for log in ring[:4]))
            row += 1
        if batch.is_fold is not None and batch.is_fold[i]:
            state.values[slot] = S
        for t in range(first, last):
            S = advanced(S, *(part[t] for part in rows[1:5]))
            q = rows.q[t].double()
            if gates.use_qk_l2norm:
                q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            y = einsum("hvk,hk->hv", S, q.repeat_interleave(ratio, 0))
            rows.out[t] = y * gates.output_scale(q.shape[1])
            for log, new in zip(ring[:4], rows[1:5], strict=True):
                log[slot, :, row % capacity] = new[t]
            row += 1
