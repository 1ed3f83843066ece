"""How the verify kernel is launched whose bits do not depend on how rows are cut into steps.

The kernel is compiled once for a layer: neither batch nor drafts choose a constant of it.
"""

from __future__ import annotations

import torch

from hybridspec.ops._triton_support import round_up_to_power_of_two
from hybridspec.ops.gated_delta_rule import launch
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.ring.view import RingView

__all__ = ["explain_batch", "explain_verify", "verify"]

_TOKENS = 8
_MOST_WINDOW = 32
_BLOCK_V = 32
_CACHE_LINE_BYTES = 128
_BUSY = 1024  # programs
WARPS = 2
STAGES = 3


def explain_verify(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> str | None:
    """Return why the kernel does not support a verify call, or None."""
    reason = launch.explain_verify(rows, gates, state, ring, batch)
    if reason is not None:
        return reason
    if batch.rand_seed is not None:
        return "it rounds folded states to nearest"
    if batch.max_rows > _TOKENS:
        return f"max_verify_tokens is {batch.max_rows}, the kernel takes up to {_TOKENS}"
    if ring.max_window > _MOST_WINDOW:
        return f"ring.max_window is {ring.max_window}, the kernel takes up to {_MOST_WINDOW}"
    return explain_batch(ring, batch)


def explain_batch(ring: RingView, batch: FoldingBatch) -> str | None:
    """Return which kind of batch or cursors is not supported, or None."""
    by_slot = batch.cu_seqlens is not None and batch.slots is not None
    if not by_slot or ring.ring_start is None or ring.has_token_decay:
        return "it takes cursors and cumulative decays by slot only"
    if batch.is_fold_by_slot or batch.keeps_padding or batch.padding != -1:
        return "it takes batches of requests with their slots only"
    if batch.fold_threshold is not None:
        return "it folds what is marked only"
    return None


def _lines(num_bytes: int) -> int:
    """Return the cache lines of a tile, or of the largest part of it that is a power of two."""
    lines = num_bytes // _CACHE_LINE_BYTES
    return 1 << (lines.bit_length() - 1) if lines else 0


def verify(rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch) -> None:
    """Launch the kernel; see `api.verify`."""
    from hybridspec.ops.gated_delta_rule.triton_ordered import ordered_verify_kernel

    q, k, v, a, b, out = rows
    cu_seqlens, slots, is_fold = batch.cu_seqlens, batch.slots, batch.is_fold
    assert cu_seqlens is not None and slots is not None
    num_requests, (_, value_heads, value_dim, key_dim) = slots.shape[0], state.values.shape
    if num_requests == 0:
        out.zero_()
        return
    operands = launch.choose_operands(q, state.values, ring)
    block_v = min(value_dim & -value_dim, _BLOCK_V)
    tiles = value_dim // block_v
    programs = min(max(_BUSY // (num_requests * value_heads), 1), tiles)
    with torch.cuda.device_of(q):
        ordered_verify_kernel[(num_requests * value_heads, programs)](
            q, k, v, a, b, gates.A_log, gates.dt_bias, state.values, ring.k, ring.u,
            ring.cum_log_decay, out, ring.ring_start, ring.history_len, cu_seqlens, slots,
            is_fold, q.shape[0], num_requests, gates.output_scale(key_dim), gates.beta_scale,
            q.stride()[:2], k.stride()[:2], v.stride()[:2], (a.stride(0), b.stride(0)),
            state.values.stride()[:3], ring.k.stride()[:3], ring.u.stride()[:3],
            ring.cum_log_decay.stride()[:2], out.stride()[:2],
            H=k.shape[1],
            HV=value_heads,
            K=key_dim,
            V=value_dim,
            RING=round_up_to_power_of_two(ring.k.shape[2]),
            WINDOW=_MOST_WINDOW,
            TOKENS=2 * _TOKENS,  # the least of a matrix instruction
            BLOCK_K=min(key_dim & -key_dim, 64),
            BLOCK_V=block_v,
            STAGES=STAGES,
            LINES=_lines(block_v * key_dim * state.values.element_size()) if q.is_cuda else 0,
            STATE_OPERAND=launch.triton_dtype(operands.state),
            RING_OPERAND=launch.triton_dtype(operands.ring),
            PRECISION=operands.precision,
            USE_L2NORM=gates.use_qk_l2norm,
            num_warps=WARPS,
        )  # fmt: skip
