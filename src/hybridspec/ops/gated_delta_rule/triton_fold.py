"""Triton kernels that advance checkpoints over ring rows: fold, materialize, and by batch row."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["advance_kernel", "advance_rows_kernel"]


@triton.jit
def load_decays(
    ring_decay_ptr, start, num_rows, WINDOW: tl.constexpr, RING: tl.constexpr,
    TOKEN_DECAY: tl.constexpr,
):  # fmt: skip
    """G of the live rows, anything in dead ones, and that of the last one."""
    window = tl.arange(0, WINDOW)
    rows = ring_decay_ptr + ((start + window) & (RING - 1))
    decay = tl.load(rows, mask=window < num_rows, other=0.0)
    if TOKEN_DECAY:
        decay = tl.cumsum(decay, axis=0)
        decay_end = tl.sum(tl.where(window == num_rows - 1, decay, 0.0), axis=0)
    else:
        last_row = (start + num_rows - 1) & (RING - 1)
        decay_end = tl.load(ring_decay_ptr + last_row, mask=num_rows > 0, other=0.0)
    return decay, decay_end


@triton.jit
def advance_tile(
    read_ptr, write_ptr, ring_k_ptr, ring_u_ptr, ring_decay_ptr, start, num_rows, v_first,
    state_stride_v, ring_k_stride_r, ring_u_stride_r,
    K: tl.constexpr, RING: tl.constexpr, WINDOW: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    TOKEN_DECAY: tl.constexpr,
):  # fmt: skip
    """e^{G_n} S0 + sum_{j<=n} e^{G_n - G_j} u_j k_j^T for value rows of a head; for n = 0 a copy.

    Pointers are those of the head.
    """
    window = tl.arange(0, WINDOW)
    window_live = window < num_rows
    window_rows = (start + window) & (RING - 1)
    k_offs = tl.arange(0, BLOCK_K)
    v_offs = v_first + tl.arange(0, BLOCK_V)
    head_offs = v_offs[:, None] * state_stride_v

    decay, decay_end = load_decays(ring_decay_ptr, start, num_rows, WINDOW, RING, TOKEN_DECAY)
    u_ptrs = ring_u_ptr + window_rows[:, None] * ring_u_stride_r + v_offs[None, :]
    u = tl.load(u_ptrs, mask=window_live[:, None], other=0.0).to(tl.float32)

    weight = tl.where(window_live, tl.exp(decay_end - decay), 0.0)
    u = tl.trans((u * weight[:, None]).to(OPERAND))
    for i in tl.static_range(K // BLOCK_K):
        offs = (i * BLOCK_K + k_offs)[None, :]
        k_ptrs = ring_k_ptr + window_rows[:, None] * ring_k_stride_r + offs
        k = tl.load(k_ptrs, mask=window_live[:, None], other=0.0).to(OPERAND)
        old = tl.load(read_ptr + head_offs + offs)
        new = tl.dot(u, k, old.to(tl.float32) * tl.exp(decay_end), input_precision=PRECISION)
        # Adding nothing would make a zero of a negative one.
        new = tl.where(num_rows > 0, new.to(old.dtype), old)
        tl.store(write_ptr + head_offs + offs, new)


@triton.jit
def advance_kernel(
    # in-out: state [S, HV, V, K]
    state_ptr,
    # inputs: ring k [S, H, R, K], u [S, HV, R, V], cum_log_decay [S, HV, R]; cursors [S]
    ring_k_ptr, ring_u_ptr, ring_decay_ptr, ring_start_ptr, history_len_ptr,
    # metadata [B]: slots to read, slots to write, rows to take in (IS_FLAG: not 0 is all)
    slots_ptr, out_slots_ptr, num_rows_ptr,
    state_strides, ring_k_strides, ring_u_strides, ring_decay_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, IS_FLAG: tl.constexpr, TOKEN_DECAY: tl.constexpr,
):  # fmt: skip
    """Write the states of some slots, advanced over their live rows, into slots."""
    TILES: tl.constexpr = V // BLOCK_V
    tl.static_assert(K % BLOCK_K == 0 and V % BLOCK_V == 0)
    pid = tl.program_id(0)
    hv, request = pid // TILES % HV, pid // (TILES * HV)
    h, hv_offs = (hv // (HV // H)).to(tl.int64), hv.to(tl.int64)

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
    advance_tile(
        state_ptr + slot * state_strides[0] + hv_offs * state_strides[1],
        state_ptr + out_slot * state_strides[0] + hv_offs * state_strides[1],
        ring_k_ptr + slot * ring_k_strides[0] + h * ring_k_strides[1],
        ring_u_ptr + slot * ring_u_strides[0] + hv_offs * ring_u_strides[1],
        ring_decay_ptr + slot * ring_decay_strides[0] + hv_offs * ring_decay_strides[1],
        tl.load(ring_start_ptr + slot).to(tl.int32), num_rows, pid % TILES * BLOCK_V,
        state_strides[2], ring_k_strides[2], ring_u_strides[2],
        K, RING, WINDOW, BLOCK_K, BLOCK_V, OPERAND, PRECISION, TOKEN_DECAY,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests"])
def advance_rows_kernel(
    # in-out: state [S, HV, V, K]
    state_ptr,
    # inputs: ring k [S, H, R, K], u [S, HV, R, V], cum_log_decay [S, HV, R]
    ring_k_ptr, ring_u_ptr, ring_decay_ptr,
    # metadata [B]: slots to read and to write, first ring row (None: 0), rows to take in
    slots_ptr, out_slots_ptr, ring_start_ptr, num_rows_ptr,
    # which requests are looked at, [B], and how many of these, [1]; None: all
    active_ptr, num_active_ptr, num_requests,
    state_strides, ring_k_strides, ring_u_strides, ring_decay_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr,
    MOST_ROWS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, TOKEN_DECAY: tl.constexpr,
):  # fmt: skip
    """As `advance_kernel`, with cursors of batch rows; as many programs as the device holds."""
    TILES: tl.constexpr = V // BLOCK_V
    tl.static_assert(K % BLOCK_K == 0 and V % BLOCK_V == 0)
    num_active = num_requests
    if num_active_ptr is not None:
        num_active = tl.minimum(tl.load(num_active_ptr), num_requests)
    pid, num_programs = tl.program_id(0), tl.num_programs(0)
    for turn in range(tl.cdiv(num_active * (HV * TILES) - pid, num_programs)):
        item = turn * num_programs + pid
        hv, request = item // TILES % HV, item // (TILES * HV)
        if active_ptr is not None:
            request = tl.load(active_ptr + request)
        is_request = (request >= 0) & (request < num_requests)
        slot = tl.load(slots_ptr + request, mask=is_request, other=-1).to(tl.int64)
        out_slot = tl.load(out_slots_ptr + request, mask=is_request, other=-1).to(tl.int64)
        num_rows = tl.load(num_rows_ptr + request, mask=is_request, other=-1)
        is_asked = (num_rows >= 0) & (num_rows <= MOST_ROWS) & ((num_rows > 0) | (slot != out_slot))
        if (slot >= 0) & (out_slot >= 0) & is_asked:
            h, hv_offs = (hv // (HV // H)).to(tl.int64), hv.to(tl.int64)
            start = 0
            if ring_start_ptr is not None:
                start = tl.load(ring_start_ptr + request)
            advance_tile(
                state_ptr + slot * state_strides[0] + hv_offs * state_strides[1],
                state_ptr + out_slot * state_strides[0] + hv_offs * state_strides[1],
                ring_k_ptr + slot * ring_k_strides[0] + h * ring_k_strides[1],
                ring_u_ptr + slot * ring_u_strides[0] + hv_offs * ring_u_strides[1],
                ring_decay_ptr + slot * ring_decay_strides[0] + hv_offs * ring_decay_strides[1],
                start, num_rows, item % TILES * BLOCK_V,
                state_strides[2], ring_k_strides[2], ring_u_strides[2],
                K, RING, WINDOW, BLOCK_K, BLOCK_V, OPERAND, PRECISION, TOKEN_DECAY,
            )  # fmt: skip
