"""Triton kernel that advances checkpoints over live ring rows: stand-alone fold and materialize."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["advance_kernel"]


@triton.jit
def advance_kernel(
    # in-out: state [S, HV, V, K]
    state_ptr,
    # inputs: ring k [S, H, R, K], u [S, HV, R, V], cum_log_decay [S, HV, R]; cursors [S]
    ring_k_ptr,
    ring_u_ptr,
    ring_decay_ptr,
    ring_start_ptr,
    history_len_ptr,
    # metadata [B]: slots to read, slots to write, rows to take in (IS_FLAG: not 0 is all)
    slots_ptr,
    out_slots_ptr,
    num_rows_ptr,
    state_stride_s,
    state_stride_h,
    state_stride_v,
    ring_k_stride_s,
    ring_k_stride_h,
    ring_k_stride_r,
    ring_u_stride_s,
    ring_u_stride_h,
    ring_u_stride_r,
    ring_decay_stride_s,
    ring_decay_stride_h,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    RING: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_FLAG: tl.constexpr,
):
    """state[out slot] <- e^{G_n} S0 + sum_{j<=n} e^{G_n - G_j} u_j k_j^T."""
    TILES: tl.constexpr = V // BLOCK_V
    tl.static_assert(K % BLOCK_K == 0 and V % BLOCK_V == 0)
    pid = tl.program_id(0)
    tile = pid % TILES
    hv = pid // TILES % HV
    request = pid // (TILES * HV)
    h = hv // (HV // H)

    slot = tl.load(slots_ptr + request).to(tl.int64)
    out_slot = tl.load(out_slots_ptr + request).to(tl.int64)
    asked = tl.load(num_rows_ptr + request).to(tl.int32)
    if slot < 0 or out_slot < 0:
        return
    num_rows = tl.load(history_len_ptr + slot).to(tl.int32)
    if IS_FLAG:
        num_rows = tl.where(asked != 0, num_rows, 0)
    else:
        num_rows = tl.minimum(tl.maximum(asked, 0), num_rows)
    if num_rows == 0 and slot == out_slot:
        return

    window = tl.arange(0, WINDOW)
    window_live = window < num_rows
    ring_start = tl.load(ring_start_ptr + slot).to(tl.int32)
    window_rows = (ring_start + window) & (RING - 1)
    k_offs = tl.arange(0, BLOCK_K)
    v_offs = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    ring_k_ptr += slot * ring_k_stride_s + h.to(tl.int64) * ring_k_stride_h
    ring_u_ptr += slot * ring_u_stride_s + hv.to(tl.int64) * ring_u_stride_h
    ring_decay_ptr += slot * ring_decay_stride_s + hv.to(tl.int64) * ring_decay_stride_h
    head_offs = hv.to(tl.int64) * state_stride_h + v_offs[:, None] * state_stride_v

    decay = tl.load(ring_decay_ptr + window_rows, mask=window_live, other=0.0)
    last_row = (ring_start + num_rows - 1) & (RING - 1)
    decay_end = tl.load(ring_decay_ptr + last_row, mask=num_rows > 0, other=0.0)
    u = tl.load(
        ring_u_ptr + window_rows[:, None] * ring_u_stride_r + v_offs[None, :],
        mask=window_live[:, None],
        other=0.0,
    ).to(tl.float32)

    weight = tl.where(window_live, tl.exp(decay_end - decay), 0.0)
    u = tl.trans((u * weight[:, None]).to(OPERAND))
    for i in tl.static_range(K // BLOCK_K):
        offs = (i * BLOCK_K + k_offs)[None, :]
        k = tl.load(
            ring_k_ptr + window_rows[:, None] * ring_k_stride_r + offs,
            mask=window_live[:, None],
            other=0.0,
        ).to(OPERAND)
        state_offs = head_offs + offs
        state = tl.load(state_ptr + slot * state_stride_s + state_offs).to(tl.float32)
        state = tl.dot(u, k, state * tl.exp(decay_end), input_precision=PRECISION)
        tl.store(
            state_ptr + out_slot * state_stride_s + state_offs,
            state.to(state_ptr.dtype.element_ty),
        )
