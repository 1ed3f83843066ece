"""Triton kernel of the verify step: corrections, outputs, append and fold in one pass.

One program of one warp serves one request and one value head (or a part of its value rows). The
recurrence over the T new rows is solved on 2T x 2T coefficients, rows and columns k_1..k_T, then
q_1..q_T. The state is then read once, tile by tile: [u; y] = (M gamma e^{G_P} X) S0^T +
(M gamma Z w) U_hist + (M beta) V, and a folding step updates and stores it from the same tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["verify_kernel"]


@triton.jit
def softplus(x):
    """log(1 + e^x), by series where e^-|x| would vanish beside 1."""
    small = tl.exp(-tl.abs(x))
    series = small * (1.0 - small * (0.5 - small * (0.33333333 - small * 0.25)))
    return tl.maximum(x, 0.0) + tl.where(small < 0.01, series, tl.log(1.0 + small))


@triton.jit
def gates(a, b, A_log, dt_bias, beta_scale, is_live):
    """Cumulative log-decay c_t and write strength beta_t of [2, T] tokens (twice the same row)."""
    log_decay = -tl.exp(A_log) * softplus(a + dt_bias)
    decay = tl.cumsum(tl.where(is_live, log_decay, 0.0), axis=1)
    beta = tl.where(is_live, beta_scale * tl.sigmoid(b), 0.0)
    return decay, beta


@triton.jit
def forward_substitution(coupling, rows, cols, num_tokens):
    """(I - N)^-1 for N whose columns past `num_tokens` are zero: one rank-1 update per token."""
    inverse = tl.where(rows == cols, 1.0, 0.0)
    for s in range(num_tokens):
        column = tl.sum(tl.where(cols == s, coupling, 0.0), axis=1)
        solved_row = tl.sum(tl.where(rows == s, inverse, 0.0), axis=0)
        inverse += column[:, None] * solved_row[None, :]
    return inverse


@triton.jit
def prefetch(ptrs):
    """Bring the cache lines behind `ptrs` into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_zero_rows(out_ptr, first, last, step, out_stride_n, v_offs, v_mask):
    zeros = tl.zeros(v_offs.shape, out_ptr.dtype.element_ty)
    for row in range(first, last, step):
        tl.store(out_ptr + row * tl.cast(out_stride_n, tl.int64) + v_offs, zeros, mask=v_mask)


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def verify_kernel(
    # inputs: q, k [N, H, K]; v [N, HV, V]; a, b [N, HV]; A_log, dt_bias [HV]
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    # in-out: state [S, HV, V, K]; ring k [S, H, R, K], u [S, HV, R, V], cum_log_decay [S, HV, R]
    state_ptr,
    ring_k_ptr,
    ring_u_ptr,
    ring_decay_ptr,
    # output [N, HV, V]
    out_ptr,
    # metadata: cursors [S] (BY_ROW: [B]); cu_seqlens [B + 1]; slots, is_fold [B]
    # None: ring_start 0; T rows each; slot b; nobody folds, or windows of at least fold_threshold
    ring_start_ptr,
    history_len_ptr,
    cu_seqlens_ptr,
    slots_ptr,
    is_fold_ptr,
    fold_threshold,
    rows_per_request,
    num_rows,
    num_requests,
    scale,
    beta_scale,
    q_stride_n,
    q_stride_h,
    k_stride_n,
    k_stride_h,
    v_stride_n,
    v_stride_h,
    a_stride_n,
    b_stride_n,
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
    out_stride_n,
    out_stride_h,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    RING: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ACT_OPERAND: tl.constexpr,
    STATE_OPERAND: tl.constexpr,
    RING_OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    BY_ROW: tl.constexpr,
    ZERO_PADDING: tl.constexpr,
):
    pid = tl.program_id(0)
    split = pid % SPLITS
    hv = pid // SPLITS % HV
    request = pid // (SPLITS * HV)
    h = hv // (HV // H)
    TILES: tl.constexpr = V // (BLOCK_V * SPLITS)
    # A tile of 32 bits is read again (from L2) where it folds: kept, it would be laid out in shared
    # memory for two uses, with bank conflicts in both.
    IS_TF32: tl.constexpr = (
        state_ptr.dtype.element_ty.primitive_bitwidth == 32 and PRECISION == "tf32"
    )
    KEEP_STATE: tl.constexpr = not IS_TF32
    tl.static_assert(K % BLOCK_K == 0 and V % (BLOCK_V * SPLITS) == 0)

    out_ptr += hv.to(tl.int64) * out_stride_h
    split_offs = split * (TILES * BLOCK_V) + tl.arange(0, BLOCK_OUT)
    split_mask = split_offs < tl.minimum(V, (split + 1) * (TILES * BLOCK_V))
    if cu_seqlens_ptr is None:
        first = request.to(tl.int64) * rows_per_request
        num_tokens = rows_per_request
    else:
        first = tl.load(cu_seqlens_ptr + request).to(tl.int64)
        num_tokens = (tl.load(cu_seqlens_ptr + request + 1) - first).to(tl.int32)
        rows_end = tl.load(cu_seqlens_ptr + num_requests).to(tl.int32) + request
        store_zero_rows(
            out_ptr, rows_end, num_rows, num_requests, out_stride_n, split_offs, split_mask
        )
    slot = request.to(tl.int64)
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + request).to(tl.int64)
    out_ptr += first * out_stride_n
    if slot < 0:
        if ZERO_PADDING:
            store_zero_rows(out_ptr, 0, num_tokens, 1, out_stride_n, split_offs, split_mask)
        return
    if num_tokens <= 0:
        return

    rows = tl.arange(0, 2 * TOKENS)
    row_token = rows % TOKENS
    row_is_q = rows >= TOKENS
    row_live = row_token < num_tokens
    k_rows = row_live & (rows < TOKENS)
    q_rows = row_live & row_is_q
    gate_token = tl.arange(0, TOKENS)[None, :] + tl.zeros([2, 1], tl.int32)
    gate_live = gate_token < num_tokens
    window = tl.arange(0, WINDOW)
    k_offs = tl.arange(0, BLOCK_K)
    a_ptr += first * a_stride_n + hv
    b_ptr += first * b_stride_n + hv
    k_ptr += first * k_stride_n + h.to(tl.int64) * k_stride_h
    q_ptr += first * q_stride_n + h.to(tl.int64) * q_stride_h
    v_ptr += first * v_stride_n + hv.to(tl.int64) * v_stride_h
    ring_k_ptr += slot * ring_k_stride_s + h.to(tl.int64) * ring_k_stride_h
    ring_u_ptr += slot * ring_u_stride_s + hv.to(tl.int64) * ring_u_stride_h
    ring_decay_ptr += slot * ring_decay_stride_s + hv.to(tl.int64) * ring_decay_stride_h
    state_ptr += slot * state_stride_s + hv.to(tl.int64) * state_stride_h

    # Everything that the small system waits for is asked for before any of it is used.
    cursor = request.to(tl.int64) if BY_ROW else slot
    ring_start = 0
    if ring_start_ptr is not None:
        ring_start = tl.load(ring_start_ptr + cursor).to(tl.int32)
    history_len = tl.load(history_len_ptr + cursor).to(tl.int32)
    k = ()
    q = ()
    k_hist = ()
    for i in tl.static_range(K // BLOCK_K):
        offs = (i * BLOCK_K + k_offs)[None, :]
        k_part_ptrs = k_ptr + row_token[:, None] * k_stride_n + offs
        q_part_ptrs = q_ptr + row_token[:, None] * q_stride_n + offs
        k += (tl.load(k_part_ptrs, mask=k_rows[:, None], other=0.0),)
        q += (tl.load(q_part_ptrs, mask=q_rows[:, None], other=0.0),)
    window_live = window < history_len
    window_rows = (ring_start + window) & (RING - 1)
    append_rows = (ring_start + history_len + row_token) & (RING - 1)
    for i in tl.static_range(K // BLOCK_K):
        offs = window_rows[:, None] * ring_k_stride_r + (i * BLOCK_K + k_offs)[None, :]
        k_hist += (tl.load(ring_k_ptr + offs, mask=window_live[:, None], other=0.0),)
    decay_hist = tl.load(ring_decay_ptr + window_rows, mask=window_live, other=0.0)
    last_row = (ring_start + history_len - 1) & (RING - 1)
    decay_end = tl.load(ring_decay_ptr + last_row, mask=history_len > 0, other=0.0)
    a = tl.load(a_ptr + gate_token * a_stride_n, mask=gate_live, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + gate_token * b_stride_n, mask=gate_live, other=0.0).to(tl.float32)
    A_log = tl.load(A_log_ptr + hv).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + hv).to(tl.float32)
    is_fold = False
    if is_fold_ptr is not None:
        is_fold = tl.load(is_fold_ptr + request) != 0
    elif fold_threshold is not None:
        is_fold = history_len >= fold_threshold
    if PREFETCH > 0:
        LINE: tl.constexpr = 1024 // state_ptr.dtype.element_ty.primitive_bitwidth
        element = tl.arange(0, PREFETCH) * LINE
        row = split * (TILES * BLOCK_V) + element // K
        prefetch(state_ptr + row.to(tl.int64) * state_stride_v + element % K)

    decay, beta = gates(a, b, A_log, dt_bias, beta_scale, gate_live)
    decay = tl.reshape(decay, [2 * TOKENS])
    beta = tl.reshape(beta, [2 * TOKENS])
    x = ()
    gram = tl.zeros([2 * TOKENS, 2 * TOKENS], tl.float32)
    for i in tl.static_range(K // BLOCK_K):
        x_part = tl.where(row_is_q[:, None], q[i], k[i]).to(ACT_OPERAND)
        gram = tl.dot(x_part, tl.trans(x_part), gram, input_precision=PRECISION)
        x += (x_part,)
    r = rows[:, None]
    c = rows[None, :]
    row_factor = tl.where(row_is_q, 1.0, -beta)
    row_norm = tl.where(row_is_q, scale, 1.0)
    col_norm = row_norm
    if USE_L2NORM:
        squares = tl.where(r == c, gram, 0.0)
        row_norm *= tl.rsqrt(tl.sum(squares, axis=1) + 1e-6)
        col_norm *= tl.rsqrt(tl.sum(squares, axis=0) + 1e-6)
    before = (c < TOKENS) & (c < (row_token + row_is_q.to(tl.int32))[:, None])
    coupling = gram * tl.exp(decay[:, None] - decay[None, :])
    coupling *= (row_factor * row_norm)[:, None] * col_norm[None, :]
    inverse = forward_substitution(tl.where(before, coupling, 0.0), r, c, num_tokens)

    gamma = row_factor * col_norm * tl.exp(decay)
    x_coeff = (inverse * gamma[None, :]).to(ACT_OPERAND)
    z = tl.zeros([2 * TOKENS, WINDOW], tl.float32)
    x_solved = ()
    keys = ()
    for i in tl.static_range(K // BLOCK_K):
        x_part = tl.dot(x_coeff, x[i], input_precision=PRECISION)
        # An always true select: without it the operand's copy to shared memory, and with it the
        # wait for the load, is placed right behind the load.
        hist_part = tl.where(window[:, None] >= 0, k_hist[i], 0.0).to(RING_OPERAND)
        z = tl.dot(x_part.to(RING_OPERAND), tl.trans(hist_part), z, input_precision=PRECISION)
        x_solved += (x_part.to(STATE_OPERAND),)
        keys += (hist_part,)
    weight = tl.where(window_live, tl.exp(decay_end - decay_hist), 0.0)
    u_coeff = (z * weight[None, :]).to(RING_OPERAND)
    v_coeff = tl.where(c < TOKENS, inverse * beta[None, :], 0.0).to(ACT_OPERAND)
    window_decay = tl.exp(decay_end)
    if split == 0:
        append_decay = decay + tl.where(is_fold, 0.0, decay_end)
        tl.store(ring_decay_ptr + append_rows, append_decay, mask=k_rows)
        if hv % (HV // H) == 0:  # one program per key head appends its rows
            for i in tl.static_range(K // BLOCK_K):
                k_part = x[i].to(tl.float32) * row_norm[:, None]
                tl.store(
                    ring_k_ptr
                    + append_rows[:, None] * ring_k_stride_r
                    + (i * BLOCK_K + k_offs)[None, :],
                    k_part.to(ring_k_ptr.dtype.element_ty),
                    mask=k_rows[:, None],
                )

    v_offs = tl.arange(0, BLOCK_V)
    new_offs = row_token[:, None] * v_stride_n + v_offs[None, :]
    out_offs = row_token[:, None] * out_stride_n + v_offs[None, :]
    hist_offs = window_rows[:, None] * ring_u_stride_r + v_offs[None, :]
    append_offs = append_rows[:, None] * ring_u_stride_r + v_offs[None, :]
    state_offs = v_offs[:, None] * state_stride_v + k_offs[None, :]
    for tile in tl.range(0, TILES, num_stages=STAGES):
        v_first = (split * TILES + tile) * BLOCK_V
        tile_ptr = state_ptr + v_first.to(tl.int64) * state_stride_v
        u_hist = tl.load(ring_u_ptr + v_first + hist_offs, mask=window_live[:, None], other=0.0)
        v = tl.load(v_ptr + v_first + new_offs, mask=k_rows[:, None], other=0.0)
        result = tl.zeros([2 * TOKENS, BLOCK_V], tl.float32)
        state = ()
        for i in tl.static_range(K // BLOCK_K):
            state_part = tl.load(tile_ptr + i * BLOCK_K + state_offs)
            result = tl.dot(
                x_solved[i],
                tl.trans(state_part.to(STATE_OPERAND)),
                result,
                input_precision=PRECISION,
            )
            if KEEP_STATE:
                state += (state_part,)
        result *= window_decay
        result = tl.dot(u_coeff, u_hist.to(RING_OPERAND), result, input_precision=PRECISION)
        result = tl.dot(v_coeff, v.to(ACT_OPERAND), result, input_precision=PRECISION)

        y = result.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + v_first + out_offs, y, mask=q_rows[:, None])
        u = result.to(ring_u_ptr.dtype.element_ty)
        tl.store(ring_u_ptr + v_first + append_offs, u, mask=k_rows[:, None])
        if is_fold:
            u_fold = tl.load(
                ring_u_ptr + v_first + hist_offs, mask=window_live[:, None], other=0.0
            ).to(tl.float32)
            u_fold = (u_fold * weight[:, None]).to(RING_OPERAND)
            for i in tl.static_range(K // BLOCK_K):
                if KEEP_STATE:
                    state_part = state[i]
                else:
                    state_part = tl.load(tile_ptr + i * BLOCK_K + state_offs)
                folded = state_part.to(tl.float32) * window_decay
                folded = tl.dot(tl.trans(u_fold), keys[i], folded, input_precision=PRECISION)
                tl.store(tile_ptr + i * BLOCK_K + state_offs, folded.to(state_ptr.dtype.element_ty))
