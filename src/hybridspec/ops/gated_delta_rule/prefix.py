"""States at a token of the recent past, for batches whose cursors are keyed by batch row.

A prefix cache wants states at round numbers of tokens, where checkpoints rarely lie: `materialize`
with the first ring row and the number of rows given for each request. Most requests of a step want
nothing, so the kernel has as many programs as the device holds, and they share what there is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec.ops._checks import Dims, check, check_devices, check_dtype, check_option
from hybridspec.ops._library import Written, register_kernel
from hybridspec.ops.gated_delta_rule.call import State
from hybridspec.ops.gated_delta_rule.contracts import check_pools
from hybridspec.ops.gated_delta_rule.cpu import compute_dtype
from hybridspec.ops.gated_delta_rule.launch import (
    advance_sizes,
    advance_strides,
    choose_operands,
    explain_advance,
)
from hybridspec.ops.ring.contracts import check_marks
from hybridspec.ops.ring.view import RingView

__all__ = ["materialize_rows"]


class Copies(NamedTuple):
    """Which states are written where.

    Attributes:
        slots: slot to read of each request, [B].
        out_slots: slot to write, [B].
        num_rows: rows to take in, [B].
        active: requests to look at, [B], negative ones are skipped; None: all.
        num_active: how many of them, [1]; None: all.
    """

    slots: Tensor
    out_slots: Tensor
    num_rows: Tensor
    active: Tensor | None
    num_active: Tensor | None


def materialize_rows(
    state: Tensor, ring_k: Tensor, ring_u: Tensor, ring_cum_log_decay: Tensor, slots: Tensor,
    out_slots: Tensor, ring_start: Tensor | None, num_rows: Tensor, *,
    active: Tensor | None = None, num_active: Tensor | None = None, max_window: int = 16,
    has_token_decay: bool = False, programs: int = 8, backend: str = "auto",
) -> None:  # fmt: skip
    """Write the states of some requests, advanced over ring rows, into other slots.

    state[out_slot] <- e^{G_n} S + sum_{j<=n} e^{G_n - G_j} u_j k_j^T, n = num_rows

    Ring row j of request b is (ring_start[b] + j) mod R. Rings and the states that are read stay.

    Args:
        state: checkpoints, [S, HV, V, K], bf16, fp16, fp32 or fp64; last stride 1; in-out.
        ring_k: normalised keys, [S, H, R, K]; last stride 1; in.
        ring_u: corrected values, [S, HV, R, V]; last stride 1; in.
        ring_cum_log_decay: log-decay since the checkpoint, [S, HV, R], fp32 or fp64; in.
        slots: slot to read of each request, [B], int32; contiguous; in.
        out_slots: slot to write, none that another request reads or writes, [B], int32;
            contiguous; in.
        ring_start: first ring row of each request, [B], int32; None: row 0; contiguous; in.
        num_rows: rows to take in, [B], int32; 0 copies every bit. Requests with a negative slot, a
            negative number of rows or more than `max_window` are skipped; contiguous; in.
        active: requests to look at, negative ones are skipped, [B], int32; None: all; in.
        num_active: how many entries of `active` are looked at, [1], int32; None: all; in.
        max_window: most rows of a window (W).
        has_token_decay: whether `ring_cum_log_decay` holds the log-decay of each token alone.
        programs: programs of the kernel on a multiprocessor.
        backend: "auto", "triton" or "reference".

    Raises:
        TypeError: for a dtype that is not supported.
        UnsupportedError: if the requested backend does not support the call; the message says why.
        ValueError: for a wrong shape, stride, ring, option or backend.

    Numerics:
        fp32 (fp64 if the state is); the state is rounded once.

    Source:
        README.md of this package.
    """
    _materialize_rows(
        State(state, None),
        RingView(
            ring_k, ring_u, ring_cum_log_decay, ring_start, num_rows, max_window, has_token_decay
        ),
        Copies(slots, out_slots, num_rows, active, num_active),
        programs,
        backend=backend,
    )


def _check(state: State, ring: RingView, copies: Copies, programs: int) -> None:
    dims: Dims = {}
    cursors = {name: tensor for name, tensor in copies._asdict().items() if tensor is not None}
    num_active = cursors.pop("num_active", None)
    if ring.ring_start is not None:
        cursors["ring_start"] = ring.ring_start
    check_marks(dims, **cursors)
    if num_active is not None:
        check("num_active", num_active, "1", dims)
        check_dtype("num_active", num_active, torch.int32)
    check_pools(state, ring, "B")
    check_devices(state=state.values, num_active=num_active, **cursors)
    check_option("programs", programs, int, low=1)


def _reference(state: Written[State], ring: RingView, copies: Copies, programs: int) -> None:
    """Go through the requests one after the other."""
    pool, dtype = state.values, compute_dtype(state.values)
    capacity, heads = ring.k.shape[2], pool.shape[1]
    slots, out_slots, num_rows, active, num_active = copies
    requests = range(slots.shape[0]) if active is None else active.tolist()
    for request in requests[: None if num_active is None else max(int(num_active), 0)]:
        if not 0 <= request < slots.shape[0]:
            continue
        cursors = (part[request] for part in (slots, out_slots, num_rows))
        slot, out_slot, count = map(int, cursors)
        start = 0 if ring.ring_start is None else int(ring.ring_start[request])
        if min(slot, out_slot, count) < 0 or count > ring.max_window:
            continue
        found = pool[slot]
        if count:
            rows = [(start + j) % capacity for j in range(count)]
            decay = ring.cum_log_decay[slot, :, rows].to(dtype)
            decay = decay.cumsum(1) if ring.has_token_decay else decay
            k = ring.k[slot, :, rows].to(dtype).repeat_interleave(heads // ring.k.shape[1], 0)
            u = ring.u[slot, :, rows].to(dtype) * (decay[:, -1:] - decay).exp()[..., None]
            found = torch.baddbmm(
                found.to(dtype) * decay[:, -1, None, None].exp(), u.mT, k
            ).to(pool.dtype)  # fmt: skip
        pool[out_slot] = found


def block_rows(value_dim: int, operand: torch.dtype) -> int:
    """Value rows of a program: many keep memory busy; products of fp32 take registers."""
    return min(value_dim & -value_dim, 16 if operand == torch.float32 else 64)


def _launch(state: State, ring: RingView, copies: Copies, programs: int) -> None:
    """Launch at most `programs` programs for each multiprocessor."""
    from hybridspec.ops.gated_delta_rule.triton_fold import advance_rows_kernel

    num_requests, pool = copies.slots.shape[0], state.values
    _, value_heads, value_dim, _ = pool.shape
    if num_requests == 0:
        return
    operands = choose_operands(ring.k, pool, ring)
    block_v = block_rows(value_dim, operands.ring)
    with torch.cuda.device_of(pool):
        most = 3  # in Triton's interpreter: few, so that each has more than one item
        if pool.is_cuda:
            most = torch.cuda.get_device_properties(pool.device).multi_processor_count * programs
        num_items = num_requests * value_heads * (value_dim // block_v)
        advance_rows_kernel[(min(num_items, most),)](
            pool, ring.k, ring.u, ring.cum_log_decay, *copies[:2], ring.ring_start, *copies[2:],
            num_requests, *advance_strides(pool, ring),
            **advance_sizes(pool, ring, operands),
            MOST_ROWS=ring.max_window,
            BLOCK_V=block_v,
            num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip


_materialize_rows = register_kernel(
    "gated_delta_rule.materialize_rows", explain_advance, _launch, _reference, _check
)
