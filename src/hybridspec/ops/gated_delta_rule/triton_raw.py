"""Triton kernel of the verify step over a raw ring: window and step as one system of 16 rows.

One program handles one request and one value head (or a part of its value rows). Row j of every
tile is row j since the checkpoint, live rows first, then those of the step, whose queries stand
beside their keys. With M = (I - N)^-1 of the keys' couplings N, and C those of the queries,

    r = beta (v - e^c S k);   u = M r;   y = scale e^c S q + C M r

where the rows of r come from one pass over the state. Nothing is rounded to 16 bits between the
ring's rows and outputs or a folded state: S k and S q are products of numbers as they are stored,
and what is wider is multiplied as the sum of two 16-bit numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.gated_delta_rule.triton_verify import (
    folds,
    forward_substitution,
    is_idle,
    load_columns,
    load_or,
    prefetch,
    rows_of,
    softplus,
    store_zero_rows,
)

__all__ = ["verify_raw_kernel"]

ROWS: tl.constexpr = tl.constexpr(16)  # of window and step


@triton.jit
def halves(x, OPERAND: tl.constexpr):
    """Two numbers of a dtype whose sum is x, up to the square of their rounding."""
    high = x.to(OPERAND)
    return high, (x - high.to(tl.float32)).to(OPERAND)


@triton.jit
def dot(a, b, c, OPERAND: tl.constexpr):
    """a b + c for fp32 numbers, of which products see two halves."""
    if tl.float32 == OPERAND:
        c = tl.dot(a, b, c, input_precision="ieee")
    else:
        a, a_rest = halves(a, OPERAND)
        b, b_rest = halves(b, OPERAND)
        c = tl.dot(a, b_rest, tl.dot(a_rest, b, c))
        c = tl.dot(a, b, c)
    return c


@triton.jit
def dot_state(x, state, c, OPERAND: tl.constexpr):
    """x state^T + c for rows as they are."""
    if state.dtype == OPERAND:
        c = tl.dot(x, tl.trans(state), c, input_precision="ieee")
    else:
        high, rest = halves(state.to(tl.float32), OPERAND)
        c = tl.dot(x, tl.trans(high), tl.dot(x, tl.trans(rest), c))
    return c


@triton.jit
def join(old, new, is_old, OPERAND: tl.constexpr):
    """Pieces of rows of the window and, below, of the step."""
    rows = ()
    for i in tl.static_range(len(old)):
        rows += (tl.where(is_old[:, None], old[i].to(OPERAND), new[i].to(OPERAND)),)
    return rows


@triton.jit
def load_numbers(old_ptrs, new_ptrs, is_old, is_new):
    """One number of each row of the window, then of the step, in fp32."""
    old = tl.load(old_ptrs, mask=is_old, other=0.0)
    new = tl.load(new_ptrs, mask=is_new, other=0.0)
    return tl.where(is_old, old.to(tl.float32), new.to(tl.float32))


@triton.jit
def append_rows(to, pieces, to_mask, BLOCK_K: tl.constexpr):
    """Store rows in pieces of columns."""
    for i in tl.static_range(len(pieces)):
        ptrs = to[:, None] + (i * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        tl.store(ptrs, pieces[i].to(to.dtype.element_ty), mask=to_mask[:, None])


@triton.jit
def row_norms(rows, USE_L2NORM: tl.constexpr):
    """Factors that scale rows to length one, or ones."""
    squares = tl.zeros([rows[0].shape[0]], tl.float32)
    for i in tl.static_range(len(rows)):
        x = rows[i].to(tl.float32)
        squares += tl.sum(x * x, axis=1)
    return tl.rsqrt(squares + 1e-6) if USE_L2NORM else squares * 0.0 + 1.0


@triton.jit
def solve(keys, queries, between, beta, key_norm, query_norm, num_rows, OPERAND: tl.constexpr):
    """M for corrections and C M for outputs, both [16, 16]."""
    rows = tl.arange(0, keys[0].shape[0])
    t, s = rows[:, None], rows[None, :]
    key_dots = tl.zeros([keys[0].shape[0], keys[0].shape[0]], tl.float32)
    query_dots = tl.zeros([keys[0].shape[0], keys[0].shape[0]], tl.float32)
    for i in tl.static_range(len(keys)):
        other = tl.trans(keys[i])
        key_dots = tl.dot(keys[i], other, key_dots, input_precision="ieee")
        query_dots = tl.dot(queries[i], other, query_dots, input_precision="ieee")
    factor = tl.exp(between) * key_norm[None, :]
    coupling = key_dots * factor * (-beta * key_norm)[:, None]
    reads = tl.where(s <= t, query_dots * factor * query_norm[:, None], 0.0)
    inverse = forward_substitution(tl.where(s < t, coupling, 0.0), t, s, num_rows)
    return inverse, dot(reads, inverse, tl.zeros_like(reads), OPERAND)


@triton.jit
def read_state(tile_ptr, offs, keys, queries, OPERAND: tl.constexpr):
    """K S^T and Q S^T for a tile of value rows."""
    of_keys = tl.zeros([keys[0].shape[0], offs.shape[0]], tl.float32)
    of_queries = tl.zeros([keys[0].shape[0], offs.shape[0]], tl.float32)
    for i in tl.static_range(len(keys)):
        part = tl.load(tile_ptr + i * offs.shape[1] + offs)
        of_keys = dot_state(keys[i], part, of_keys, OPERAND)
        of_queries = dot_state(queries[i], part, of_queries, OPERAND)
    return of_keys, of_queries


@triton.jit
def fold_tile(tile_ptr, offs, weighted_u, keys, window_decay, OPERAND: tl.constexpr):
    """Store e^{c_P} S + (w u)^T k for a tile of value rows, which is read again, from a cache."""
    left, rest = halves(tl.trans(weighted_u), OPERAND)
    for i in tl.static_range(len(keys)):
        ptrs = tile_ptr + i * offs.shape[1] + offs
        part = tl.load(ptrs)
        folded = tl.dot(left, keys[i], part.to(tl.float32) * window_decay, input_precision="ieee")
        if tl.float32 != OPERAND:
            folded = tl.dot(rest, keys[i], folded)
        tl.store(ptrs, folded.to(part.dtype))


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def verify_raw_kernel(
    # inputs: q, k [N, H, K]; v [N, HV, V]; a, b [N, HV]; A_log, dt_bias [HV]
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr,
    # in-out: state [S, HV, V, K]; ring k [S, H, R, K], v [S, HV, R, V], a, b [S, HV, R]
    state_ptr, ring_k_ptr, ring_v_ptr, ring_a_ptr, ring_b_ptr,
    # output [N, HV, V]
    out_ptr,
    # metadata: cursors [S] (BY_ROW: [B]); cu_seqlens [B + 1]; slots [B]; is_fold [B]
    # None: T rows each; slot b; none folds, or windows of at least fold_threshold
    ring_start_ptr, history_len_ptr, cu_seqlens_ptr, slots_ptr, is_fold_ptr,
    fold_threshold, rows_per_request, num_rows, num_requests, scale, beta_scale,
    # strides of all dimensions but the last, which are 1; gates: those of a and b
    q_strides, k_strides, v_strides, gate_strides, state_strides,
    ring_k_strides, ring_v_strides, ring_a_strides, ring_b_strides, out_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_OUT: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, ZERO_PADDING: tl.constexpr,
    OPERAND: tl.constexpr, USE_L2NORM: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    split, hv, request = pid % SPLITS, pid // SPLITS % HV, pid // (SPLITS * HV)
    h, hv_offs = (hv // (HV // H)).to(tl.int64), hv.to(tl.int64)
    TILES: tl.constexpr = V // (BLOCK_V * SPLITS)
    PARTS: tl.constexpr = K // BLOCK_K
    tl.static_assert(K % BLOCK_K == 0 and V % (BLOCK_V * SPLITS) == 0)

    out_ptr += hv_offs * out_strides[1]
    split_offs = split * (TILES * BLOCK_V) + tl.arange(0, BLOCK_OUT)
    split_mask = split_offs < tl.minimum(V, (split + 1) * (TILES * BLOCK_V))
    first, num_tokens = rows_of(cu_seqlens_ptr, request, rows_per_request)
    if cu_seqlens_ptr is not None:
        rows_end = tl.load(cu_seqlens_ptr + num_requests).to(tl.int32) + request
        store_zero_rows(
            out_ptr, rows_end, num_rows, num_requests, out_strides[0], split_offs, split_mask
        )
    slot = load_or(slots_ptr, request, request).to(tl.int64)
    out_ptr += first * out_strides[0]
    if slot < 0:
        if ZERO_PADDING:
            store_zero_rows(out_ptr, 0, num_tokens, 1, out_strides[0], split_offs, split_mask)
        return
    if is_idle(is_fold_ptr, request, num_tokens):
        return

    k_ptr += first * k_strides[0] + h * k_strides[1]
    q_ptr += first * q_strides[0] + h * q_strides[1]
    v_ptr += first * v_strides[0] + hv_offs * v_strides[1]
    ring_k_ptr += slot * ring_k_strides[0] + h * ring_k_strides[1]
    ring_v_ptr += slot * ring_v_strides[0] + hv_offs * ring_v_strides[1]
    ring_a_ptr += slot * ring_a_strides[0] + hv_offs * ring_a_strides[1]
    ring_b_ptr += slot * ring_b_strides[0] + hv_offs * ring_b_strides[1]
    state_ptr += slot * state_strides[0] + hv_offs * state_strides[1]

    cursor = request.to(tl.int64) if BY_ROW else slot
    history_len = tl.load(history_len_ptr + cursor).to(tl.int32)
    rows = tl.arange(0, ROWS)
    ring_rows = (tl.load(ring_start_ptr + cursor) + rows) & (RING - 1)
    live, last = rows < history_len, history_len + num_tokens
    tokens, is_new = rows - history_len, (rows >= history_len) & (rows < last)
    old_keys = load_columns(ring_k_ptr + ring_rows * ring_k_strides[2], live, BLOCK_K, PARTS)
    new_keys = load_columns(k_ptr + tokens * k_strides[0], is_new, BLOCK_K, PARTS)
    queries = load_columns(q_ptr + tokens * q_strides[0], is_new, BLOCK_K, PARTS)
    a = load_numbers(
        ring_a_ptr + ring_rows, a_ptr + hv + (first + tokens) * gate_strides[0], live, is_new
    )
    b = load_numbers(
        ring_b_ptr + ring_rows, b_ptr + hv + (first + tokens) * gate_strides[1], live, is_new
    )
    A_log, dt_bias = tl.load(A_log_ptr + hv).to(tl.float32), tl.load(dt_bias_ptr + hv)
    is_fold = folds(is_fold_ptr, fold_threshold, request, history_len)
    prefetch(state_ptr, split * (TILES * BLOCK_V), state_strides[2], K, PREFETCH)
    if split == 0:
        tl.store(ring_a_ptr + ring_rows, a, mask=is_new)
        tl.store(ring_b_ptr + ring_rows, b, mask=is_new)
        if hv % (HV // H) == 0:  # one program per key head appends its rows
            append_rows(ring_k_ptr + ring_rows * ring_k_strides[2], new_keys, is_new, BLOCK_K)

    # Decays between rows are sums of what lies between: differences of sums lose small ones.
    log_decay = -tl.exp(A_log) * softplus(a + dt_bias.to(tl.float32))
    log_decay = tl.where(rows < last, log_decay, 0.0)
    below = rows[:, None] > rows[None, :]
    between = tl.cumsum(tl.where(below, log_decay[:, None], 0.0), axis=0)
    decay = tl.exp(tl.cumsum(log_decay, axis=0))
    beta = tl.where(rows < last, beta_scale * tl.sigmoid(b), 0.0)
    keys = join(old_keys, new_keys, live, OPERAND)
    queries = join(queries, queries, live, OPERAND)
    key_norm = row_norms(keys, USE_L2NORM)
    query_norm = scale * row_norms(queries, USE_L2NORM)
    inverse, reads = solve(keys, queries, between, beta, key_norm, query_norm, last, OPERAND)

    is_last = rows[:, None] == history_len - 1  # no row of an empty window, which is left as it is
    weight = tl.exp(tl.sum(tl.where(is_last, between, 0.0), axis=0)) * key_norm
    weight = tl.where(live, weight, 0.0)
    window_decay = tl.exp(tl.sum(tl.where(live, log_decay, 0.0), axis=0))
    v_offs = tl.arange(0, BLOCK_V)
    old_offs = ring_rows[:, None] * ring_v_strides[2] + v_offs[None, :]
    new_offs = tokens[:, None] * v_strides[0] + v_offs[None, :]
    out_offs = tokens[:, None] * out_strides[0] + v_offs[None, :]
    state_offs = v_offs[:, None] * state_strides[2] + tl.arange(0, BLOCK_K)[None, :]
    for tile in tl.range(0, TILES, num_stages=STAGES):
        v_first = (split * TILES + tile) * BLOCK_V
        tile_ptr = state_ptr + v_first.to(tl.int64) * state_strides[2]
        old_v = tl.load(ring_v_ptr + v_first + old_offs, mask=live[:, None], other=0.0)
        new_v = tl.load(v_ptr + v_first + new_offs, mask=is_new[:, None], other=0.0)
        of_keys, y = read_state(tile_ptr, state_offs, keys, queries, OPERAND)
        v = tl.where(live[:, None], old_v.to(tl.float32), new_v.to(tl.float32))
        r = beta[:, None] * v - (beta * decay * key_norm)[:, None] * of_keys
        y = dot(reads, r, y * (decay * query_norm)[:, None], OPERAND)
        tl.store(out_ptr + v_first + out_offs, y.to(out_ptr.dtype.element_ty), mask=is_new[:, None])
        appended = new_v.to(ring_v_ptr.dtype.element_ty)
        tl.store(ring_v_ptr + v_first + old_offs, appended, mask=is_new[:, None])
        if is_fold & (history_len > 0):
            weighted_u = weight[:, None] * dot(inverse, r, tl.zeros_like(r), OPERAND)
            fold_tile(tile_ptr, state_offs, weighted_u, keys, window_decay, OPERAND)
