"""Verify, fold and materialize in PyTorch operators: what a CPU runs, and anything else can.

`naive.py` does the same in a loop, and the README beside it derives the equations. Here requests
and heads form one batch dimension; a state is only touched through a view of its slot, so a step
that does not fold neither copies nor changes it. On small models the cost is the number of
operators called, hence the merged products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridspec.ops._library import Lasting, Written
from hybridspec.ops._requests import check_distinct, check_slots
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.host_batch import HostBatch
from hybridspec.ops.gated_delta_rule.int8_state import quantise, widen
from hybridspec.ops.gated_delta_rule.rounding import fold_words, round_by_chance
from hybridspec.ops.norms.reference import gdn_gates, widened
from hybridspec.ops.ring.addressing import Window, append_rows, read_cursors
from hybridspec.ops.ring.view import RingView

__all__ = [
    "absorb",
    "compute_dtype",
    "delta_rows",
    "fold",
    "materialize",
    "normalise_",
    "read_state",
    "verify",
]

# sqrt(|x|^2 + eps) is the hypotenuse of |x| and this
_ROOT_OF_EPS = {d: torch.tensor(1e-3, dtype=d) for d in (torch.float32, torch.float64)}


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """fp64 if one of the tensors is fp64, else fp32."""
    is_wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if is_wide else torch.float32


def normalise_(x: Tensor) -> Tensor:
    """Scale rows to length one, in place: x / sqrt(sum(x^2) + 1e-6)."""
    length = torch.linalg.vector_norm(x, 2, -1, True)
    root_of_eps = _ROOT_OF_EPS[x.dtype]
    return x.div_(length.hypot_(root_of_eps.to(x.device) if x.is_cuda else root_of_eps))


def _tiles(state: Tensor, dtype: torch.dtype) -> list[slice]:
    """Row ranges of V; a state of another dtype is widened in parts, never all of it at once."""
    size = state.shape[1]
    step = size if state.dtype == dtype else max(1, min(32, size // 2))
    return [slice(first, first + step) for first in range(0, size, step)]


def _widened_tile(
    state: Tensor, scale: Tensor | None, tile: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return rows of V of a state as they are stored and, which may be the same, in a dtype."""
    part = state[:, tile]
    if scale is None:
        return part, part.to(dtype)
    return part, widen(part, scale[:, tile], dtype)


def read_state(x: Tensor, state: Tensor, scale: Tensor | None = None) -> Tensor:
    """Multiply rows x [HV, T, K] with a state [HV, V, K]: [HV, T, V]."""
    if state.dtype == x.dtype:
        return torch.bmm(x, state.mT)
    tiles = (_widened_tile(state, scale, t, x.dtype)[1] for t in _tiles(state, x.dtype))
    return torch.cat([torch.bmm(x, tile.mT) for tile in tiles], 2)


def absorb(
    state: Tensor, k: Tensor, u: Tensor, cum: Tensor, scale: Tensor | None = None,
    words: Tensor | None = None,
) -> None:  # fmt: skip
    """Advance a state [HV, V, K] in place over rows k [H, P, K], u [HV, P, V], cum [HV, P].

    S <- e^{cum_P} S + sum_j e^{cum_P - cum_j} u_j k_j^T, rounded once, by chance if there are words
    """
    if cum.shape[1] == 0:
        return
    (heads, num_rows, key_dim), value_heads = k.shape, state.shape[0]
    total = cum[:, -1:]
    weighted = (u * (total - cum).exp().unsqueeze(-1)).mT
    shape = (heads, value_heads // heads, num_rows, key_dim)
    keys = k.unsqueeze(1).expand(shape).reshape(value_heads, num_rows, key_dim)
    decay = total.exp().unsqueeze(-1)
    for tile in _tiles(state, u.dtype):
        part, wide = _widened_tile(state, scale, tile, u.dtype)
        wide.mul_(decay).baddbmm_(weighted[:, tile], keys)
        if scale is not None:
            quantise(wide, part, scale[:, tile])
        elif words is not None:
            part.copy_(round_by_chance(wide, words[:, tile], part.dtype))
        elif part.dtype != u.dtype:
            part.copy_(wide)


def delta_rows(
    x: Tensor, k: Tensor, v: Tensor, cum: Tensor, since: Tensor, beta: Tensor,
    window: Window | None, read: Callable[[Tensor], Tensor], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Solve for the corrections of T rows behind a window, and read the rows' outputs.

    u_t = beta_t (v_t - e^{c_t} S_h k_t) - sum_{s<t} beta_t e^{c_t-c_s} (k_t.k_s) u_s
    y_t = scale (e^{c_t} S_h q_t + sum_{s<=t} e^{c_t-c_s} (q_t.k_s) u_s)

    Args:
        x: [B * H, 2T, K], the keys, then the queries.
        k: [B * H, T, K], the keys alone.
        v: [B * HV, T, V].
        cum: [B * HV, T], c.
        since: [B * HV, T], the same since the checkpoint, G_P + c.
        beta: [B * HV, T].
        window: rows between the checkpoint and these, or None.
        read: multiplies rows [B * HV, 2T, K] with the checkpoints, [B * HV, 2T, V].
        scale: factor of the outputs.

    Returns:
        u and y, both [B * HV, T, V].
    """
    (heads, _, key_dim), (value_heads, size, _) = x.shape, v.shape
    ratio = value_heads // heads

    # What each row reads, one column per source: live rows, then rows of this step.
    if window is None:
        keys, past, num_live = k, cum, 0
    else:
        keys, num_live = torch.cat((window.k, k), 1), window.k.shape[1]
        past = torch.cat((window.cum - window.total, cum), 1)
    decay = (cum.unsqueeze(2) - past.unsqueeze(1)).exp_()
    dots = torch.bmm(x, keys.mT).view(heads, 1, 2, size, -1)
    mix = dots * decay.view(heads, ratio, 1, size, -1)
    if size > 1:
        # Decays above the diagonal may have overflowed; tril selects them away.
        mix.tril_(num_live)
    live, own = mix.view(value_heads, 2 * size, -1).split_with_sizes((num_live, size), 2)

    weighted = x.view(heads, 1, 2, size, key_dim) * since.exp().view(heads, ratio, 1, size, 1)
    base = read(weighted.view(value_heads, 2 * size, key_dim))
    if window is not None and num_live:
        base.baddbmm_(live, window.u)
    told, asked = base.split_with_sizes((size, size), 1)
    lower, reads = own.split_with_sizes((size, size), 1)
    beta = beta.unsqueeze(2)
    u = (v - told).mul_(beta)
    if size > 1:
        u = torch.linalg.solve_triangular(lower * beta, u, upper=False, unitriangular=True)
    return u, torch.baddbmm(asked, reads, u, beta=scale, alpha=scale)


def verify(
    rows: Written[Rows], gates: Lasting[Gates], state: Lasting[Written[State]],
    ring: Lasting[Written[RingView]], batch: Lasting[FoldingBatch],
) -> None:  # fmt: skip
    """Check T_b rows of each request; see `hybridspec.ops.gated_delta_rule.verify`."""
    q, k, v, a, b, out = rows
    slots, is_fold = batch.by_request()
    assert batch.cu_seqlens is not None
    host = HostBatch.read(
        batch.cu_seqlens, slots, num_rows=q.shape[0], num_slots=state.values.shape[0],
        max_verify_tokens=batch.max_rows,
    )  # fmt: skip
    flags = [0] * slots.shape[0] if is_fold is None else is_fold.tolist()
    if any(flags):
        _fold_without_rows(state, ring, slots.tolist(), flags, host.requests, batch.rand_seed)
    if not host.slots:
        out.zero_()
        return
    dtype = compute_dtype(q, a, state.values)
    starts, lengths = read_cursors(ring, host.slots, host.lengths)
    window = Window.read(ring, host.slots, starts, lengths, dtype)

    x = widened(torch.cat((host.by_head(k), host.by_head(q)), 1), dtype)
    if gates.use_qk_l2norm:
        normalise_(x)
    keys = x.narrow(1, 0, host.size)
    log_decay, beta = gdn_gates(widened(a, dtype), b, gates.A_log, gates.dt_bias, gates.beta_scale)
    steps = host.by_head(log_decay)
    cum = steps.cumsum(1) if host.size > 1 else steps

    def read_slot(weighted: Tensor, slot: int) -> Tensor:
        return read_state(weighted, state.values[slot], _factors(state, slot))

    def read(weighted: Tensor) -> Tensor:
        if len(host.slots) == 1:
            return read_slot(weighted, host.slots[0])
        parts = weighted.unflatten(0, (len(host.slots), -1)).unbind()
        return torch.cat([read_slot(x, slot) for x, slot in zip(parts, host.slots, strict=True)])

    values = widened(host.by_head(v), dtype)
    since = cum + window.total
    scale = gates.output_scale(k.shape[2])
    u, y = delta_rows(x, keys, values, cum, since, host.by_head(beta), window, read, scale)
    host.pack(y, out)

    folding = [i for i, request in enumerate(host.requests) if flags[request]]
    if folding:
        _fold_requests(state, window, host.slots, starts, lengths, folding, batch.rand_seed)
        by_request = (len(host.slots), -1, host.size)
        since.view(by_request)[folding] = cum.reshape(by_request)[folding]
    decays = steps if ring.has_token_decay else since
    capacity = ring.k.shape[2]
    free = [(start + n) % capacity for start, n in zip(starts, lengths, strict=True)]
    for pool, appended in ((ring.k, keys), (ring.u, u), (ring.cum_log_decay, decays)):
        append_rows(pool, appended, host.slots, free, host.lengths)


def _fold_without_rows(
    state: State, ring: RingView, slots: list[int], flags: list[int], requests: list[int],
    rand_seed: Tensor | None,
) -> None:  # fmt: skip
    """Fold marked requests that have no rows; `requests` are those that have."""
    marked = [i for i, slot in enumerate(slots) if flags[i] and slot >= 0 and i not in requests]
    if marked:
        folding = [slots[i] for i in marked]
        longest = [ring.k.shape[2]] * len(folding)
        _materialize(state, ring, folding, folding, longest, rand_seed)


def _factors(state: State, slot: int) -> Tensor | None:
    return None if state.scale is None else state.scale[slot]


def _fold_requests(
    state: State, window: Window, slots: list[int], starts: list[int], lengths: list[int],
    folding: list[int], rand_seed: Tensor | None,
) -> None:  # fmt: skip
    """Absorb the windows of some requests into their checkpoints."""
    k, u, cum = (by_head.unflatten(0, (len(slots), -1)) for by_head in window[:3])
    for i in folding:
        n, slot, words = lengths[i], slots[i], None
        if rand_seed is not None:
            words = fold_words(rand_seed, slot, starts[i], tuple(state.values.shape[1:]))
        mine = (k[i, :, :n], u[i, :, :n], cum[i, :, :n])
        absorb(state.values[slot], *mine, _factors(state, slot), words)


def materialize(
    state: Written[State], ring: RingView, slots: Tensor, out_slots: Tensor, num_rows: Tensor
) -> None:
    """Write the state after the first live rows of each slot; see the public function."""
    _materialize(state, ring, slots.tolist(), out_slots.tolist(), num_rows.tolist())


def fold(state: Written[State], ring: RingView, slots: Tensor, is_fold: Tensor) -> None:
    """Fold the live windows of the marked requests; see the public function."""
    pairs = zip(slots.tolist(), is_fold.tolist(), strict=True)
    marked = [slot for slot, flag in pairs if flag and slot >= 0]
    check_distinct(marked)
    _materialize(state, ring, marked, marked, [ring.k.shape[2]] * len(marked))


def _materialize(
    state: State, ring: RingView, slots: list[int], out_slots: list[int], num_rows: list[int],
    rand_seed: Tensor | None = None,
) -> None:  # fmt: skip
    values = state.values
    check_slots("slots", slots, values.shape[0])
    check_slots("out_slots", out_slots, values.shape[0])
    calls = [call for call in zip(slots, out_slots, num_rows, strict=True) if min(call[:2]) >= 0]
    check_distinct([target for _, target, _ in calls], "out_slots")
    starts, lengths = read_cursors(ring, [slot for slot, _, _ in calls], [0] * len(calls))
    for (slot, target, asked), start, length in zip(calls, starts, lengths, strict=True):
        n = max(0, min(asked, length))
        window = Window.read(ring, [slot], [start], [n], compute_dtype(values))
        if target != slot:
            for pool in filter(torch.is_tensor, state):
                pool[target].copy_(pool[slot])
        words = None
        if rand_seed is not None:
            words = fold_words(rand_seed, target, start, tuple(values.shape[1:]))
        absorb(values[target], window.k, window.u, window.cum, _factors(state, target), words)
