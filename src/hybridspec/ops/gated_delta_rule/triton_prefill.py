"""Triton kernels around a chunked prefill of another library: its inputs, and what becomes of it.

The library wants packed, contiguous rows, computed gates, states by request and a list of chunks,
and knows no padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.gated_delta_rule.triton_verify import softplus

__all__ = ["finish_kernel", "list_chunks_kernel", "move_states_kernel", "prepare_kernel"]


@triton.jit(do_not_specialize=["num_requests", "num_chunks"])
def list_chunks_kernel(
    # input [B + 1]
    cu_seqlens_ptr,
    # output: (request, chunk of the request) [num_chunks, 2]
    chunks_ptr,
    num_requests,
    num_chunks,
    CHUNK: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the chunks in the order of the rows; what is left over lies behind its request's end."""
    requests = tl.arange(0, REQUESTS)
    is_request = requests < num_requests
    begins = tl.load(cu_seqlens_ptr + requests, mask=is_request, other=0).to(tl.int32)
    ends = tl.load(cu_seqlens_ptr + 1 + requests, mask=is_request, other=0).to(tl.int32)
    chunk_ends = tl.cumsum(tl.cdiv(ends - begins, CHUNK), 0)

    chunks = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_before = is_request[None, :] & (chunk_ends[None, :] <= chunks[:, None])
    request = tl.sum(is_before.to(tl.int32), 1)
    number = chunks - tl.max(tl.where(is_before, chunk_ends[None, :], 0), 1)
    is_real = request < num_requests
    mask = chunks < num_chunks
    tl.store(chunks_ptr + 2 * chunks, tl.where(is_real, request, 0), mask=mask)
    tl.store(chunks_ptr + 2 * chunks + 1, tl.where(is_real, number, num_chunks), mask=mask)


@triton.jit
def _normed(x, NORM: tl.constexpr):
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    return x


@triton.jit
def prepare_kernel(
    # inputs: q, k [N, H, K]; v [N, HV, V]; a, b [N, HV]; A_log, dt_bias [HV]
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    # outputs, contiguous: q, k [N, H, K]; v [N, HV, V]; log_decay, beta [N, HV]
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    log_decay_ptr,
    beta_ptr,
    beta_scale,
    q_stride_n,
    q_stride_h,
    k_stride_n,
    k_stride_h,
    v_stride_n,
    v_stride_h,
    a_stride_n,
    b_stride_n,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORM: tl.constexpr,
):
    """One program per row: scale q and k to length one per head, copy v, compute the gates."""
    row = tl.program_id(0).to(tl.int64)
    heads, k_offs = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_K)[None, :]
    value_heads, v_offs = tl.arange(0, BLOCK_HV)[:, None], tl.arange(0, BLOCK_V)[None, :]
    k_mask = (heads < H) & (k_offs < K)
    v_mask = (value_heads < HV) & (v_offs < V)
    gate_heads = tl.arange(0, BLOCK_HV)
    gate_mask = gate_heads < HV

    q = tl.load(q_ptr + row * q_stride_n + heads * q_stride_h + k_offs, mask=k_mask, other=0.0)
    k = tl.load(k_ptr + row * k_stride_n + heads * k_stride_h + k_offs, mask=k_mask, other=0.0)
    v_ptrs = v_ptr + row * v_stride_n + value_heads * v_stride_h + v_offs
    v = tl.load(v_ptrs, mask=v_mask, other=0.0)
    a = tl.load(a_ptr + row * a_stride_n + gate_heads, mask=gate_mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride_n + gate_heads, mask=gate_mask, other=0.0).to(tl.float32)
    A_log = tl.load(A_log_ptr + gate_heads, mask=gate_mask, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + gate_heads, mask=gate_mask, other=0.0).to(tl.float32)

    q, k = _normed(q.to(tl.float32), NORM), _normed(k.to(tl.float32), NORM)
    log_decay = -tl.exp(A_log) * softplus(a + dt_bias)
    beta = beta_scale * tl.sigmoid(b)

    k_places = row * (H * K) + heads * K + k_offs
    tl.store(q_out_ptr + k_places, q.to(q_out_ptr.dtype.element_ty), mask=k_mask)
    tl.store(k_out_ptr + k_places, k.to(k_out_ptr.dtype.element_ty), mask=k_mask)
    tl.store(v_out_ptr + row * (HV * V) + value_heads * V + v_offs, v, mask=v_mask)
    tl.store(log_decay_ptr + row * HV + gate_heads, log_decay, mask=gate_mask)
    tl.store(beta_ptr + row * HV + gate_heads, beta, mask=gate_mask)


@triton.jit
def move_states_kernel(
    # pool [S, HV, V, K]; states by request [B, HV, V, K], contiguous; one is read, one is written
    pool_ptr,
    batch_ptr,
    # metadata: cu_seqlens [B + 1]; slots [B]
    cu_seqlens_ptr,
    slots_ptr,
    pool_stride_s,
    pool_stride_h,
    pool_stride_v,
    HV: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_STORE: tl.constexpr,
):
    """Read the states of requests, zeros for those without a slot or rows, or write them back."""
    pid = tl.program_id(0)
    request, head = pid // HV, (pid % HV).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    num_rows = tl.load(cu_seqlens_ptr + request + 1) - tl.load(cu_seqlens_ptr + request)
    num_live = tl.where((slot >= 0) & (num_rows > 0), V * K, 0)
    mask = index < num_live
    pool_ptrs = pool_ptr + slot * pool_stride_s + head * pool_stride_h
    pool_ptrs += (index // K) * tl.cast(pool_stride_v, tl.int64) + index % K
    batch_ptrs = batch_ptr + pid.to(tl.int64) * (V * K) + index

    if IS_STORE:
        state = tl.load(batch_ptrs, mask=mask)
        tl.store(pool_ptrs, state.to(pool_ptr.dtype.element_ty), mask=mask)
    else:
        state = tl.load(pool_ptrs, mask=mask, other=0)
        tl.store(batch_ptrs, state.to(batch_ptr.dtype.element_ty), mask=index < V * K)


@triton.jit(do_not_specialize=["num_requests"])
def finish_kernel(
    # input [N, HV, V], contiguous
    y_ptr,
    # output [N, HV, V]
    out_ptr,
    # metadata: cu_seqlens [B + 1]; slots [B]
    cu_seqlens_ptr,
    slots_ptr,
    num_requests,
    out_stride_n,
    out_stride_h,
    HV: tl.constexpr,
    V: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a row, or write zeros where it belongs to no slot."""
    row = tl.program_id(0).to(tl.int64)
    requests = tl.arange(0, REQUESTS)
    is_request = requests < num_requests
    begins = tl.load(cu_seqlens_ptr + requests, mask=is_request, other=0).to(tl.int64)
    ends = tl.load(cu_seqlens_ptr + 1 + requests, mask=is_request, other=0).to(tl.int64)
    slots = tl.load(slots_ptr + requests, mask=is_request, other=-1).to(tl.int64)
    is_mine = (begins <= row) & (row < ends)
    slot = tl.max(tl.where(is_mine, slots, -1), axis=0)

    for start in tl.static_range(0, HV * V, BLOCK):
        index = start + tl.arange(0, BLOCK)
        is_read = index < tl.where(slot >= 0, HV * V, 0)
        y = tl.load(y_ptr + row * (HV * V) + index, mask=is_read, other=0.0)
        places = row * out_stride_n + (index // V) * out_stride_h + index % V
        tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=index < HV * V)
