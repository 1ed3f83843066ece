"""Plain PyTorch verify, fold and materialize: the oracle of all kernels and the CPU backend.

Requests and heads are batched; the state is only ever met through per-request views, so a step
that does not fold neither copies nor changes it. Equations are those of the package's README.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..norms.reference import compute_dtype, gdn_gates
from .ring import RingView

__all__ = ["absorb", "delta_rows", "fold", "materialize", "normalise", "read_state", "verify"]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests that have rows: slots, first rows and lengths, as host integers."""

    slots: list[int]
    offsets: list[int]
    lengths: list[int]
    num_rows: int

    @classmethod
    def read(cls, cu_seqlens: Tensor, slots: Tensor) -> _Batch:
        bounds = cu_seqlens.tolist()
        live = [
            (slot, first, last - first)
            for slot, first, last in zip(slots.tolist(), bounds[:-1], bounds[1:], strict=True)
            if slot >= 0 and last > first
        ]
        columns = list(zip(*live, strict=True)) or [(), (), ()]
        return cls(*(list(column) for column in columns), num_rows=max(columns[2], default=0))

    def is_uniform(self) -> bool:
        first, size = self.offsets[0], self.num_rows
        return all(n == size for n in self.lengths) and all(
            offset == first + i * size for i, offset in enumerate(self.offsets)
        )

    def rows(self) -> list[int]:
        return [
            offset + t
            for offset, n in zip(self.offsets, self.lengths, strict=True)
            for t in range(n)
        ]

    def places(self) -> list[int]:
        return [b * self.num_rows + t for b, n in enumerate(self.lengths) for t in range(n)]


class _Packing:
    """Moves packed rows to [B, T, ...] and back; ragged batches are padded with zeros."""

    def __init__(self, batch: _Batch, device: torch.device) -> None:
        self.shape = (len(batch.slots), batch.num_rows)
        self.first = batch.offsets[0]
        self.is_uniform = batch.is_uniform()
        if not self.is_uniform:
            self.rows = torch.tensor(batch.rows(), device=device)
            self.places = torch.tensor(batch.places(), device=device)

    def unpack(self, packed: Tensor) -> Tensor:
        size = self.shape[0] * self.shape[1]
        if self.is_uniform:
            rows = packed.narrow(0, self.first, size)
        else:
            rows = packed.new_zeros((size, *packed.shape[1:]))
            rows.index_copy_(0, self.places, packed.index_select(0, self.rows))
        return rows.view(*self.shape, *packed.shape[1:])

    def pack(self, rows: Tensor, out: Tensor) -> None:
        size = self.shape[0] * self.shape[1]
        if self.is_uniform:
            if size < out.shape[0]:
                out.zero_()
            out.narrow(0, self.first, size).view(rows.shape).copy_(rows)
        else:
            out.zero_()
            flat = rows.reshape(size, *rows.shape[2:]).index_select(0, self.places)
            out.index_copy_(0, self.rows, flat.to(out.dtype))


@dataclass(frozen=True, slots=True)
class _Window:
    """Live ring rows of the batch, dead rows zero: k [B,H,P,K], u [B,HV,P,V], G [B,HV,P]."""

    k: Tensor
    u: Tensor
    cum: Tensor
    total: Tensor  # [B, HV, 1], G of the last live row, 0 without one

    @classmethod
    def read(
        cls,
        ring: RingView,
        slots: list[int],
        starts: list[int],
        lengths: list[int],
        dtype: torch.dtype,
    ) -> _Window:
        num_rows, capacity = max(lengths), ring.k.shape[2]
        if len(slots) == 1 and starts[0] + num_rows <= capacity:
            parts = [
                pool[slots[0] : slots[0] + 1].narrow(2, starts[0], num_rows)
                for pool in (ring.k, ring.u, ring.cum_log_decay)
            ]
            k, u, cum = (part.to(dtype) for part in parts)
            total = cum[:, :, -1:] if num_rows else cum.new_zeros((*cum.shape[:2], 1))
            return cls(k, u, cum, total)
        device = ring.k.device
        rows = [[(start + j) % capacity for j in range(num_rows)] for start in starts]
        index = (
            torch.tensor(slots, device=device)[:, None],
            slice(None),
            torch.tensor(rows, device=device, dtype=torch.int64).view(len(slots), num_rows),
        )
        counts = torch.tensor(lengths, device=device)
        is_dead = torch.arange(num_rows, device=device) >= counts[:, None]
        k = ring.k[index].to(dtype).masked_fill(is_dead[:, :, None, None], 0.0)
        u = ring.u[index].to(dtype).masked_fill(is_dead[:, :, None, None], 0.0)
        cum = ring.cum_log_decay[index].to(dtype).masked_fill(is_dead[:, :, None], 0.0)
        k, u, cum = k.transpose(1, 2), u.transpose(1, 2), cum.transpose(1, 2)
        if num_rows == 0:
            return cls(k, u, cum, cum.new_zeros((*cum.shape[:2], 1)))
        last = (counts - 1).clamp_min(0).view(-1, 1, 1).expand(-1, cum.shape[1], 1)
        return cls(k, u, cum, cum.gather(2, last))


def normalise(x: Tensor, dtype: torch.dtype, use_qk_l2norm: bool) -> Tensor:
    x = x.to(dtype)
    if use_qk_l2norm:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x


def _tiles(state: Tensor, dtype: torch.dtype) -> list[slice]:
    """Row ranges of V in which a state of another dtype is widened, never all of it at once."""
    size = state.shape[1]
    step = size if state.dtype == dtype else max(1, min(32, size // 2))
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def read_state(x: Tensor, state: Tensor) -> Tensor:
    """Multiply rows [HV, T, K] with a state [HV, V, K]: [HV, T, V]."""
    parts = [torch.bmm(x, state[:, t].to(x.dtype).mT) for t in _tiles(state, x.dtype)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def absorb(state: Tensor, u: Tensor, k: Tensor, cum: Tensor) -> None:
    """Advance a state [HV, V, K] in place over rows u [HV, P, V], k [H, P, K], cum [HV, P].

    S <- e^{cum_P} S + sum_j e^{cum_P - cum_j} u_j k_j^T
    """
    if cum.shape[1] == 0:
        return
    total = cum[:, -1:]
    weighted = (u * (total - cum).exp().unsqueeze(-1)).mT
    keys = k.repeat_interleave(state.shape[0] // k.shape[0], 0)
    decay = total.exp().unsqueeze(-1)
    for tile in _tiles(state, u.dtype):
        part = state[:, tile]
        wide = part.to(u.dtype).mul_(decay) if part.dtype != u.dtype else part.mul_(decay)
        wide.baddbmm_(weighted[:, tile], keys)
        if wide is not part:
            part.copy_(wide)


def delta_rows(
    x: Tensor, v: Tensor, cum: Tensor, beta: Tensor, base: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Solve for the corrections of T rows and read their outputs.

    Args:
        x: [B, H, 2T, K], keys, then queries.
        v: [B, HV, T, V].
        cum: [B, HV, T], log-decay accumulated over the rows.
        beta: [B, HV, T, 1].
        base: [B, HV, 2T, V], what the rows read from everything before them.
        scale: factor of the outputs.

    Returns:
        u [B, HV, T, V] and y [B, HV, T, V].
    """
    num_heads, (batch, value_heads, size, _) = x.shape[1], v.shape
    shape = (batch, num_heads, value_heads // num_heads)
    gram = (x @ x[:, :, :size].mT).view(batch, num_heads, 1, 2, size, size)
    decay = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).exp()
    # above the diagonal the decay may overflow; tril selects it away
    mix = (gram * decay.view(*shape, 1, size, size)).tril()
    mix = mix.view(batch, value_heads, 2, size, size)
    u = (v - base[:, :, :size]) * beta
    if size > 1:
        u = torch.linalg.solve_triangular(mix[:, :, 0] * beta, u, upper=False, unitriangular=True)
    y = torch.baddbmm(
        base[:, :, size:].flatten(0, 1),
        mix[:, :, 1].flatten(0, 1),
        u.flatten(0, 1),
        beta=scale,
        alpha=scale,
    )
    return u, y.view(v.shape)


def _append(
    ring: RingView, batch: _Batch, starts: list[int], k: Tensor, u: Tensor, cum: Tensor
) -> None:
    """Write rows t < T_b of each request behind its live window; starts = first free rows."""
    capacity, lengths = ring.k.shape[2], batch.lengths
    pools = ((ring.k, k), (ring.u, u), (ring.cum_log_decay, cum))
    if len(lengths) == 1 and starts[0] + lengths[0] <= capacity:
        for pool, rows in pools:
            pool[batch.slots[0]].narrow(1, starts[0], lengths[0]).copy_(rows[0])
        return
    device = k.device
    flat = [(b, t) for b, n in enumerate(lengths) for t in range(n)]
    source = (
        torch.tensor([b for b, _ in flat], device=device),
        slice(None),
        torch.tensor([t for _, t in flat], device=device),
    )
    target = (
        torch.tensor([batch.slots[b] for b, _ in flat], device=device),
        slice(None),
        torch.tensor([(starts[b] + t) % capacity for b, t in flat], device=device),
    )
    for pool, rows in pools:
        pool[target] = rows[source].to(pool.dtype)


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    ring: RingView,
    cu_seqlens: Tensor,
    slots: Tensor,
    is_fold: Tensor | None,
    out: Tensor,
    scale: float,
    use_qk_l2norm: bool,
    beta_scale: float,
) -> None:
    """Check T_b rows of each request; see `hybridspec.ops.gated_delta_rule.verify`."""
    batch = _Batch.read(cu_seqlens, slots)
    if not batch.slots:
        out.zero_()
        return
    folds = [False] * len(batch.slots)
    if is_fold is not None:
        asked = dict(zip(slots.tolist(), is_fold.tolist(), strict=True))
        folds = [bool(asked[slot]) for slot in batch.slots]
    dtype = compute_dtype(torch.promote_types(a.dtype, state.dtype))
    packing = _Packing(batch, q.device)
    num_slots, value_heads, size = len(batch.slots), v.shape[1], batch.num_rows
    starts = [int(ring.ring_start[slot]) for slot in batch.slots]
    history = [int(ring.history_len[slot]) for slot in batch.slots]
    window = _Window.read(ring, batch.slots, starts, history, dtype)

    keys, queries = packing.unpack(k).transpose(1, 2), packing.unpack(q).transpose(1, 2)
    x = normalise(torch.cat((keys, queries), 2), dtype, use_qk_l2norm)
    values = packing.unpack(v).transpose(1, 2).to(dtype)
    log_decay, beta = gdn_gates(
        packing.unpack(a).to(dtype), packing.unpack(b), A_log, dt_bias, beta_scale
    )
    cum = log_decay.transpose(1, 2).cumsum(2)
    beta = beta.transpose(1, 2).unsqueeze(-1)

    ratio = value_heads // x.shape[1]
    wide = x.repeat_interleave(ratio, 1) if ratio > 1 else x
    parts = [read_state(wide[i], state[slot]) for i, slot in enumerate(batch.slots)]
    base = torch.stack(parts).view(num_slots, value_heads, 2, size, -1)
    base = base * (cum + window.total).exp().view(num_slots, value_heads, 1, size, 1)
    base = base.view(num_slots, value_heads, 2 * size, -1)
    if max(history):
        reach = x @ window.k.mT
        decay = (cum.unsqueeze(-1) + (window.total - window.cum).unsqueeze(-2)).exp()
        shape = (num_slots, x.shape[1], ratio, 1, size, -1)
        mix = reach.view(num_slots, x.shape[1], 1, 2, size, -1) * decay.view(shape)
        base = base + mix.reshape(num_slots, value_heads, 2 * size, -1) @ window.u

    u, y = delta_rows(x, values, cum, beta, base, scale)
    packing.pack(y.transpose(1, 2), out)

    before = window.total
    if any(folds):
        is_folding = torch.tensor(folds, device=cum.device).view(-1, 1, 1)
        before = before.masked_fill(is_folding, 0.0)
        for i, slot in enumerate(batch.slots):
            if folds[i]:
                n = history[i]
                absorb(state[slot], window.u[i, :, :n], window.k[i, :, :n], window.cum[i, :, :n])
    free = [start + n for start, n in zip(starts, history, strict=True)]
    capacity = ring.k.shape[2]
    _append(ring, batch, [row % capacity for row in free], x[:, :, :size], u, cum + before)


def materialize(
    state: Tensor, ring: RingView, slots: list[int], out_slots: list[int], num_rows: list[int]
) -> None:
    """Write the state after the first live rows of each slot; see the public function."""
    dtype = compute_dtype(state.dtype)
    for slot, target, asked in zip(slots, out_slots, num_rows, strict=True):
        if slot < 0 or target < 0:
            continue
        n = max(0, min(asked, int(ring.history_len[slot])))
        window = _Window.read(ring, [slot], [int(ring.ring_start[slot])], [n], dtype)
        if target != slot:
            state[target].copy_(state[slot])
        absorb(state[target], window.u[0], window.k[0], window.cum[0])


def fold(state: Tensor, ring: RingView, slots: Tensor, is_fold: Tensor) -> None:
    """Fold the live window of the marked slots into their checkpoints."""
    asked = zip(slots.tolist(), is_fold.tolist(), strict=True)
    marked = [slot for slot, flag in asked if flag]
    materialize(state, ring, marked, marked, [ring.k.shape[2]] * len(marked))
