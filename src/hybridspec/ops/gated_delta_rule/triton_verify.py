"""Triton kernel of the verify step: corrections, outputs, append and fold in one pass.

One program of one warp handles one request and one value head (or a part of its value rows). The
recurrence over the T new rows is solved on 2T x 2T coefficients, rows and columns k_1..k_T, then
q_1..q_T. The state is then read once, tile by tile: [u; y] = (M gamma e^{G_P} X) S0^T +
(M gamma Z w) U_hist + (M beta) V, and a folding step updates and stores it from the same tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.gated_delta_rule.triton_fold import load_decays
from hybridspec.ops.gated_delta_rule.triton_rounding import fold_words, round_by_chance

__all__ = ["verify_kernel"]


@triton.jit
def softplus(x):
    """log(1 + e^x), by series where e^-|x| would vanish beside 1."""
    small = tl.exp(-tl.abs(x))
    series = small * (1.0 - small * (0.5 - small * (0.33333333 - small * 0.25)))
    return tl.maximum(x, 0.0) + tl.where(small < 0.01, series, tl.log(1.0 + small))


@triton.jit
def load_gates(a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, strides, num_tokens, TOKENS: tl.constexpr):
    """a, b of [2, T] tokens (twice the same row), A_log and dt_bias in fp32."""
    token = tl.arange(0, TOKENS)[None, :] + tl.zeros([2, 1], tl.int32)
    a = tl.load(a_ptr + token * strides[0], mask=token < num_tokens, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * strides[1], mask=token < num_tokens, other=0.0).to(tl.float32)
    return a, b, tl.load(A_log_ptr).to(tl.float32), tl.load(dt_bias_ptr).to(tl.float32)


@triton.jit
def gates(a, b, A_log, dt_bias, beta_scale, num_tokens):
    """Log-decay g_t, its sum c_t, and write strength beta_t of rows k_1..k_T, q_1..q_T."""
    is_live = (tl.arange(0, a.shape[1])[None, :] + tl.zeros([2, 1], tl.int32)) < num_tokens
    log_decay = tl.where(is_live, -tl.exp(A_log) * softplus(a + dt_bias), 0.0)
    decay = tl.cumsum(log_decay, axis=1)
    beta = tl.where(is_live, beta_scale * tl.sigmoid(b), 0.0)
    rows: tl.constexpr = [2 * a.shape[1]]
    return tl.reshape(log_decay, rows), tl.reshape(decay, rows), tl.reshape(beta, rows)


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
def prefetch(ptr, first_row, row_stride, K: tl.constexpr, LINES: tl.constexpr):
    """Bring that many cache lines, from a row on, into L2."""
    if LINES > 0:
        LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
        element = tl.arange(0, LINES) * LINE
        ptrs = ptr + (first_row + element // K).to(tl.int64) * row_stride + element % K
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def store_zero_rows(out_ptr, first, last, step, out_stride_n, v_offs, v_mask):
    zeros = tl.zeros(v_offs.shape, out_ptr.dtype.element_ty)
    for row in range(first, last, step):
        tl.store(out_ptr + row * tl.cast(out_stride_n, tl.int64) + v_offs, zeros, mask=v_mask)


@triton.jit
def load_columns(rows, mask, BLOCK_K: tl.constexpr, PARTS: tl.constexpr):
    """Rows in PARTS pieces of BLOCK_K columns, zero where masked."""
    pieces = ()
    for i in tl.static_range(PARTS):
        ptrs = rows[:, None] + (i * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        pieces += (tl.load(ptrs, mask=mask[:, None], other=0.0),)
    return pieces


@triton.jit
def rows_of(cu_seqlens_ptr, request, rows_per_request):
    """First row of a request, and how many it has."""
    if cu_seqlens_ptr is None:
        return request.to(tl.int64) * rows_per_request, rows_per_request
    else:
        first = tl.load(cu_seqlens_ptr + request).to(tl.int64)
        return first, (tl.load(cu_seqlens_ptr + request + 1) - first).to(tl.int32)


@triton.jit
def folds(is_fold_ptr, fold_threshold, mark, history_len):
    """Whether a request folds: as it is marked, else by the rows of its window."""
    is_fold = False
    if is_fold_ptr is not None:
        is_fold = tl.load(is_fold_ptr + mark) != 0
    elif fold_threshold is not None:
        is_fold = history_len >= fold_threshold
    return is_fold


@triton.jit
def is_idle(is_fold_ptr, mark, num_tokens):
    """Whether a request has no rows and does not fold."""
    idle = num_tokens <= 0
    if is_fold_ptr is not None:
        idle &= tl.load(is_fold_ptr + mark, mask=idle, other=0) == 0
    return idle


@triton.jit
def stack(k, q, is_q, OPERAND: tl.constexpr):
    """Rows X = [k_1..k_T; q_1..q_T] from keys and queries loaded in rows of X each."""
    x = ()
    for i in tl.static_range(len(k)):
        x += (tl.where(is_q[:, None], q[i], k[i]).to(OPERAND),)
    return x


@triton.jit
def load_or(ptr, index, default):
    """A number of a tensor, or the default where there is no tensor."""
    if ptr is None:
        return default
    else:
        return tl.load(ptr + index)


@triton.jit
def solve(x, decay, beta, scale, num_tokens, PRECISION: tl.constexpr, USE_L2NORM: tl.constexpr):
    """Solve the system of a step for rows X = [k_1..k_T; q_1..q_T].

    Returns M, gamma (factors of columns of M that multiply the state) and factors of rows of X.
    """
    TOKENS: tl.constexpr = decay.shape[0] // 2
    rows = tl.arange(0, 2 * TOKENS)
    row_token, row_is_q = rows % TOKENS, rows >= TOKENS
    r, c = rows[:, None], rows[None, :]
    gram = tl.zeros([2 * TOKENS, 2 * TOKENS], tl.float32)
    for i in tl.static_range(len(x)):
        gram = tl.dot(x[i], tl.trans(x[i]), gram, input_precision=PRECISION)
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
    return inverse, row_factor * col_norm * tl.exp(decay), row_norm


@triton.jit
def multiply_rows(
    coeff,
    x,
    k_hist,
    STATE_OPERAND: tl.constexpr,
    RING_OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Left factors of the state, M gamma X, live keys, and products of the two."""
    z = tl.zeros([coeff.shape[0], k_hist[0].shape[0]], tl.float32)
    window = tl.arange(0, k_hist[0].shape[0])
    x_solved = ()
    keys = ()
    for i in tl.static_range(len(x)):
        x_part = tl.dot(coeff, x[i], input_precision=PRECISION)
        # An always true select: without it the operand's copy to shared memory, and with it the
        # wait for the load, is placed right behind the load.
        hist_part = tl.where(window[:, None] >= 0, k_hist[i], 0.0).to(RING_OPERAND)
        z = tl.dot(x_part.to(RING_OPERAND), tl.trans(hist_part), z, input_precision=PRECISION)
        x_solved += (x_part.to(STATE_OPERAND),)
        keys += (hist_part,)
    return x_solved, keys, z


@triton.jit
def append_keys(row_ptrs, x, row_norm, mask, BLOCK_K: tl.constexpr):
    """Store normalised keys in ring rows."""
    for i in tl.static_range(len(x)):
        k_part = (x[i].to(tl.float32) * row_norm[:, None]).to(row_ptrs.dtype.element_ty)
        ptrs = row_ptrs[:, None] + (i * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        tl.store(ptrs, k_part, mask=mask[:, None])


@triton.jit
def read_state(tile_ptr, offs, x, PARTS: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr):
    """X S^T for a tile of value rows, and its pieces if they are to be kept for a fold."""
    result = tl.zeros([x[0].shape[0], offs.shape[0]], tl.float32)
    state = ()
    for i in tl.static_range(PARTS):
        part = tl.load(tile_ptr + i * offs.shape[1] + offs)
        operand = tl.trans(part.to(x[i].dtype))
        result = tl.dot(x[i], operand, result, input_precision=PRECISION)
        if KEEP:
            state += (part,)
    return result, state


@triton.jit
def fold_tile(
    tile_ptr, offs, state, u_ptrs, window_live, weight, keys, window_decay, chance, first_row,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store e^{G_P} S + (w u)^T k for a tile of value rows, read again if no piece was kept.

    `chance`: where the seed is, slot and first ring row, from which rounding follows; no seed: to
    nearest. `first_row` counts value rows of all heads.
    """
    BLOCK_K: tl.constexpr = offs.shape[1]
    u = tl.load(u_ptrs, mask=window_live[:, None], other=0.0).to(tl.float32)
    weighted_u = (u * weight[:, None]).to(keys[0].dtype)
    for i in tl.static_range(len(keys)):
        ptrs = tile_ptr + i * offs.shape[1] + offs
        part = state[i] if len(state) > 0 else tl.load(ptrs)
        folded = part.to(tl.float32) * window_decay
        folded = tl.dot(tl.trans(weighted_u), keys[i], folded, input_precision=PRECISION)
        if chance[0] is None:
            tl.store(ptrs, folded.to(part.dtype))
        else:
            rows = first_row + tl.arange(0, offs.shape[0])[:, None]
            columns = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            words = fold_words(chance, rows * (len(keys) * BLOCK_K) + columns)
            tl.store(ptrs, round_by_chance(folded, words, part.dtype))


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def verify_kernel(
    # inputs: q, k [N, H, K]; v [N, HV, V]; a, b [N, HV]; A_log, dt_bias [HV]
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr,
    # in-out: state [S, HV, V, K]; ring k [S, H, R, K], u [S, HV, R, V], cum_log_decay [S, HV, R]
    state_ptr, ring_k_ptr, ring_u_ptr, ring_decay_ptr,
    # output [N, HV, V]
    out_ptr,
    # metadata: cursors [S] (BY_ROW: [B]); cu_seqlens [B + 1]; slots [B]; is_fold [B] or [S]
    # None: ring_start 0; T rows each; slot b; none folds, or windows of at least fold_threshold;
    # rand_seed [1], or None: folds are rounded to nearest
    ring_start_ptr, history_len_ptr, cu_seqlens_ptr, slots_ptr, is_fold_ptr, rand_seed_ptr,
    fold_threshold, rows_per_request, num_rows, num_requests, scale, beta_scale, padding,
    # stride of slots; of all dimensions but the last, which are 1; gates: those of a and b
    slot_stride, q_strides, k_strides, v_strides, gate_strides,
    state_strides, ring_k_strides, ring_u_strides, ring_decay_strides, out_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, FOLD_BY_SLOT: tl.constexpr,
    RING: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, TOKEN_DECAY: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_OUT: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, ZERO_PADDING: tl.constexpr,
    ACT_OPERAND: tl.constexpr, STATE_OPERAND: tl.constexpr, RING_OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, USE_L2NORM: tl.constexpr, BY_ROW: tl.constexpr,
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
    slot = load_or(slots_ptr, request * slot_stride, request).to(tl.int64)
    out_ptr += first * out_strides[0]
    if slot <= padding:
        if ZERO_PADDING:
            store_zero_rows(out_ptr, 0, num_tokens, 1, out_strides[0], split_offs, split_mask)
        return
    mark = slot if FOLD_BY_SLOT else request
    if is_idle(is_fold_ptr, mark, num_tokens):
        return

    rows = tl.arange(0, 2 * TOKENS)
    row_token, row_is_q = rows % TOKENS, rows >= TOKENS
    k_rows = (row_token < num_tokens) & (rows < TOKENS)
    q_rows = (row_token < num_tokens) & row_is_q
    k_ptr += first * k_strides[0] + h * k_strides[1]
    q_ptr += first * q_strides[0] + h * q_strides[1]
    v_ptr += first * v_strides[0] + hv_offs * v_strides[1]
    ring_k_ptr += slot * ring_k_strides[0] + h * ring_k_strides[1]
    ring_u_ptr += slot * ring_u_strides[0] + hv_offs * ring_u_strides[1]
    ring_decay_ptr += slot * ring_decay_strides[0] + hv_offs * ring_decay_strides[1]
    state_ptr += slot * state_strides[0] + hv_offs * state_strides[1]

    # Everything that the small system waits for is asked for before any of it is used.
    cursor = request.to(tl.int64) if BY_ROW else slot
    ring_start = load_or(ring_start_ptr, cursor, 0)
    history_len = tl.load(history_len_ptr + cursor).to(tl.int32)
    window_live = tl.arange(0, WINDOW) < history_len
    window_rows = (ring_start + tl.arange(0, WINDOW)) & (RING - 1)
    append_rows = (ring_start + history_len + row_token) & (RING - 1)
    k = load_columns(k_ptr + row_token * k_strides[0], k_rows, BLOCK_K, PARTS)
    q = load_columns(q_ptr + row_token * q_strides[0], q_rows, BLOCK_K, PARTS)
    k_hist = load_columns(ring_k_ptr + window_rows * ring_k_strides[2], window_live, BLOCK_K, PARTS)
    decays = load_decays(ring_decay_ptr, ring_start, history_len, WINDOW, RING, TOKEN_DECAY)
    decay_hist, decay_end = decays
    a, b, A_log, dt_bias = load_gates(
        a_ptr + first * gate_strides[0] + hv, b_ptr + first * gate_strides[1] + hv,
        A_log_ptr + hv, dt_bias_ptr + hv, gate_strides, num_tokens, TOKENS,
    )  # fmt: skip
    is_fold = folds(is_fold_ptr, fold_threshold, mark, history_len)
    prefetch(state_ptr, split * (TILES * BLOCK_V), state_strides[2], K, PREFETCH)

    log_decay, decay, beta = gates(a, b, A_log, dt_bias, beta_scale, num_tokens)
    x = stack(k, q, row_is_q, ACT_OPERAND)
    inverse, gamma, row_norm = solve(x, decay, beta, scale, num_tokens, PRECISION, USE_L2NORM)
    coeff = (inverse * gamma[None, :]).to(ACT_OPERAND)
    x_solved, keys, z = multiply_rows(coeff, x, k_hist, STATE_OPERAND, RING_OPERAND, PRECISION)
    weight = tl.where(window_live, tl.exp(decay_end - decay_hist), 0.0)
    u_coeff = (z * weight[None, :]).to(RING_OPERAND)
    v_coeff = tl.where(rows[None, :] < TOKENS, inverse * beta[None, :], 0.0).to(ACT_OPERAND)
    window_decay = tl.exp(decay_end)
    if split == 0:
        since = decay + tl.where(is_fold, 0.0, decay_end)
        tl.store(ring_decay_ptr + append_rows, log_decay if TOKEN_DECAY else since, mask=k_rows)
        if hv % (HV // H) == 0:  # one program per key head appends its rows
            append_keys(ring_k_ptr + append_rows * ring_k_strides[2], x, row_norm, k_rows, BLOCK_K)

    # A tile of 32 bits is read again (from L2) where it folds: kept, it would be laid out in shared
    # memory for two uses, with bank conflicts in both.
    KEEP_STATE: tl.constexpr = state_ptr.dtype.element_ty != tl.float32 or PRECISION != "tf32"
    v_offs = tl.arange(0, BLOCK_V)
    new_offs = row_token[:, None] * v_strides[0] + v_offs[None, :]
    out_offs = row_token[:, None] * out_strides[0] + v_offs[None, :]
    hist_offs = window_rows[:, None] * ring_u_strides[2] + v_offs[None, :]
    append_offs = append_rows[:, None] * ring_u_strides[2] + v_offs[None, :]
    state_offs = v_offs[:, None] * state_strides[2] + tl.arange(0, BLOCK_K)[None, :]
    for tile in tl.range(0, TILES, num_stages=STAGES):
        v_first = (split * TILES + tile) * BLOCK_V
        tile_ptr = state_ptr + v_first.to(tl.int64) * state_strides[2]
        u_hist = tl.load(ring_u_ptr + v_first + hist_offs, mask=window_live[:, None], other=0.0)
        v = tl.load(v_ptr + v_first + new_offs, mask=k_rows[:, None], other=0.0)
        result, state = read_state(tile_ptr, state_offs, x_solved, PARTS, KEEP_STATE, PRECISION)
        result *= window_decay
        result = tl.dot(u_coeff, u_hist.to(RING_OPERAND), result, input_precision=PRECISION)
        result = tl.dot(v_coeff, v.to(ACT_OPERAND), result, input_precision=PRECISION)
        y, u = result.to(out_ptr.dtype.element_ty), result.to(ring_u_ptr.dtype.element_ty)
        tl.store(out_ptr + v_first + out_offs, y, mask=q_rows[:, None])
        tl.store(ring_u_ptr + v_first + append_offs, u, mask=k_rows[:, None])
        if is_fold:
            fold_tile(
                tile_ptr, state_offs, state, ring_u_ptr + v_first + hist_offs, window_live, weight,
                keys, window_decay, (rand_seed_ptr, slot, ring_start), hv * V + v_first, PRECISION,
            )  # fmt: skip
