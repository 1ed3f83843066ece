"""Triton kernel of one token per request without a ring: the state is read, advanced and stored."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.gated_delta_rule.triton_verify import softplus

__all__ = ["decode_kernel"]


@triton.jit
def decode_kernel(
    # inputs: q, k [B, H, K]; v [B, HV, V]; a, b [B, HV]; A_log, dt_bias [HV]
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr,
    # in-out: state [S, HV, V, K]
    state_ptr,
    # output [B, HV, V]
    out_ptr,
    # metadata [B]: slots up to `padding` are none, and are so far apart
    slots_ptr, padding, slot_stride, scale,
    # strides of all dimensions but the last, which are 1; gates: those of a and b
    q_strides, k_strides, v_strides, gate_strides, state_strides, out_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr, USE_L2NORM: tl.constexpr,
):  # fmt: skip
    """S <- e^g S; u = beta (v - S k); S <- S + u k^T; y = scale S q, for some value rows."""
    TILES: tl.constexpr = V // BLOCK_V
    tl.static_assert(V % BLOCK_V == 0)
    pid = tl.program_id(0).to(tl.int64)
    tile, hv, request = pid % TILES, pid // TILES % HV, pid // (TILES * HV)
    h = hv // (HV // H)

    v_offs = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    k_offs = tl.arange(0, COLUMNS)
    k_mask = k_offs < K
    out_ptrs = out_ptr + request * out_strides[0] + hv * out_strides[1] + v_offs
    slot = tl.load(slots_ptr + request * slot_stride).to(tl.int64)
    if slot <= padding:
        tl.store(out_ptrs, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty))
        return

    head_ptr = state_ptr + slot * state_strides[0] + hv * state_strides[1]
    state_ptrs = head_ptr + v_offs[:, None] * state_strides[2] + k_offs[None, :]
    stored = tl.load(state_ptrs, mask=k_mask[None, :], other=0.0)
    q_ptrs = q_ptr + request * q_strides[0] + h * q_strides[1] + k_offs
    k_ptrs = k_ptr + request * k_strides[0] + h * k_strides[1] + k_offs
    q = tl.load(q_ptrs, mask=k_mask, other=0.0).to(tl.float32)
    k = tl.load(k_ptrs, mask=k_mask, other=0.0).to(tl.float32)
    v_ptrs = v_ptr + request * v_strides[0] + hv * v_strides[1] + v_offs
    v = tl.load(v_ptrs).to(tl.float32)
    a = tl.load(a_ptr + request * gate_strides[0] + hv).to(tl.float32)
    b = tl.load(b_ptr + request * gate_strides[1] + hv).to(tl.float32)
    A_log = tl.load(A_log_ptr + hv).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + hv).to(tl.float32)

    if USE_L2NORM:
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    log_decay = -tl.exp(A_log) * softplus(a + dt_bias)
    state = stored.to(tl.float32) * tl.exp(log_decay)
    u = tl.sigmoid(b) * (v - tl.sum(state * k[None, :], axis=1))
    state += u[:, None] * k[None, :]
    y = scale * tl.sum(state * q[None, :], axis=1)

    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty))
    tl.store(state_ptrs, state.to(stored.dtype), mask=k_mask[None, :])
