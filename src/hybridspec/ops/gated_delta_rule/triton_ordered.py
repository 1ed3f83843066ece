"""Triton kernel of the verify step whose bits do not depend on how rows are cut into steps.

A row's corrections and outputs are a function of the checkpoint, the rows of the window before it
as the ring holds them, and itself. Whatever is added up runs over the places of the window: rows
that the ring holds and rows of this step lie side by side in one operand, zeros elsewhere. The
system is solved row by row, and u is rounded before the next row reads it. A fold comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.gated_delta_rule.triton_fold import advance_tile
from hybridspec.ops.gated_delta_rule.triton_verify import prefetch, softplus, store_zero_rows

__all__ = ["ordered_verify_kernel"]


@triton.jit
def pick(values, is_it, axis: tl.constexpr):
    """What is marked along an axis, and nothing else: a sum with zeros changes no bit."""
    return tl.sum(tl.where(is_it, values, 0.0), axis=axis)


@triton.jit
def load_part(rows, mask, i: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns of the i-th piece of rows, fp32, zero where masked."""
    ptrs = rows[:, None] + (i * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    return tl.load(ptrs, mask=mask[:, None], other=0.0).to(tl.float32)


@triton.jit
def norm_factor(
    rows, mask, PARTS: tl.constexpr, BLOCK_K: tl.constexpr, USE_L2NORM: tl.constexpr
):  # fmt: skip
    """What scales rows to length one; 1 without a norm."""
    factor = tl.full([rows.shape[0]], 1.0, tl.float32)
    if USE_L2NORM:
        squares = tl.zeros([rows.shape[0]], tl.float32)
        for i in tl.static_range(PARTS):
            part = load_part(rows, mask, i, BLOCK_K)
            squares += tl.sum(part * part, axis=1)
        factor = tl.rsqrt(squares + 1e-6)
    return factor


@triton.jit
def multiply_keys(
    k_rows, q_rows, key_rows, is_new, is_token, is_stored, appends, PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr, STATE_OPERAND: tl.constexpr, RING_OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, USE_L2NORM: tl.constexpr,
):  # fmt: skip
    """Append normed keys; products of new keys and queries with all keys, by place.

    Keys are rounded as the ring holds them. Also returns new keys and queries in pieces.
    """
    k_norm = norm_factor(k_rows, is_new, PARTS, BLOCK_K, USE_L2NORM)
    q_norm = norm_factor(q_rows, is_token, PARTS, BLOCK_K, USE_L2NORM)
    own = tl.zeros([k_rows.shape[0], k_rows.shape[0]], tl.float32)
    asked = tl.zeros([q_rows.shape[0], k_rows.shape[0]], tl.float32)
    keys = ()
    queries = ()
    for i in tl.static_range(PARTS):
        new = load_part(k_rows, is_new, i, BLOCK_K) * k_norm[:, None]
        new = new.to(key_rows.dtype.element_ty)
        ptrs = key_rows[:, None] + (i * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        stored = tl.load(ptrs, mask=is_stored[:, None], other=0.0)
        if appends:
            tl.store(ptrs, new, mask=is_new[:, None])
        seen = tl.trans(tl.where(is_stored[:, None], stored, new).to(RING_OPERAND))
        query = load_part(q_rows, is_token, i, BLOCK_K) * q_norm[:, None]
        own = tl.dot(new.to(RING_OPERAND), seen, own, input_precision=PRECISION)
        asked = tl.dot(query.to(RING_OPERAND), seen, asked, input_precision=PRECISION)
        keys += (new.to(STATE_OPERAND),)
        queries += (query.to(STATE_OPERAND),)
    return own, asked, keys, queries


@triton.jit
def load_gates(a_ptrs, b_ptrs, A_log_ptr, dt_bias_ptr, mask, beta_scale):
    """Log-decay and write strength of tokens; zero strength where masked."""
    a = tl.load(a_ptrs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)
    A_log, dt_bias = tl.load(A_log_ptr).to(tl.float32), tl.load(dt_bias_ptr).to(tl.float32)
    beta = tl.where(mask, beta_scale * tl.sigmoid(b), 0.0)
    return -tl.exp(A_log) * softplus(a + dt_bias), beta


@triton.jit
def fold_first(
    state_ptr, ring_k_ptr, ring_u_ptr, ring_decay_ptr, ring_start, history_len, state_stride,
    ring_k_stride, ring_u_stride, first_tile, last_tile, K: tl.constexpr, RING: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the window into the checkpoint; what follows reads it as it is stored."""
    for tile in range(first_tile, last_tile):
        advance_tile(
            state_ptr, state_ptr, ring_k_ptr, ring_u_ptr, ring_decay_ptr, ring_start, history_len,
            tile * BLOCK_V, state_stride, ring_k_stride, ring_u_stride, K, RING, WINDOW, BLOCK_K,
            BLOCK_V, OPERAND, PRECISION, False,
        )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def add_decays(log_decay, stored, history_len, num_tokens, TOKENS: tl.constexpr):
    """Decay since the checkpoint, by place of the window and by token; one token at a time."""
    places, tokens = tl.arange(0, stored.shape[0]), tl.arange(0, TOKENS)
    total = pick(stored, places == history_len - 1, 0)
    by_place = stored
    by_token = tl.zeros([TOKENS], tl.float32)
    for t in range(num_tokens):
        is_here = places == history_len + t
        total += pick(log_decay, is_here, 0)
        by_place = tl.where(is_here, total, by_place)
        by_token = tl.where(tokens == t, total, by_token)
    return by_place, by_token


@triton.jit
def solve_in_order(rest, coupling, u, history_len, num_tokens, u_dtype):
    """Fill in u of the step's places, each rounded as the ring holds it before the next one.

    u_t = rest_t - sum_s coupling_(s, t) u_s
    """
    places = tl.arange(0, u.shape[0])
    for t in range(num_tokens):
        is_here = places == history_len + t
        factors = pick(coupling, is_here[None, :], 1)
        terms = tl.where(is_here[:, None], rest, 0.0) - factors[:, None] * u
        rounded = tl.sum(terms, axis=0).to(u_dtype).to(tl.float32)
        u = tl.where(is_here[:, None], rounded[None, :], u)
    return u


@triton.jit
def weigh(dots, row_decay, decay, is_seen):
    """Products of keys with the decay between them, of what a row sees."""
    since = tl.where(is_seen, row_decay[:, None] - decay[None, :], 0.0)
    return tl.where(is_seen, dots * tl.exp(since), 0.0)


@triton.jit
def clear_rows(
    out_ptr, first, num_tokens, rows_end, slot, request, num_rows, num_requests, stride,
    first_tile, last_tile, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store zeros in rows behind the last request, and in those of a request without a slot."""
    v_offs = tl.arange(0, BLOCK_V)
    for tile in range(first_tile, last_tile):
        offs, mask = tile * BLOCK_V + v_offs, v_offs < BLOCK_V
        store_zero_rows(out_ptr, rows_end + request, num_rows, num_requests, stride, offs, mask)
        if slot < 0:
            store_zero_rows(out_ptr, first, first + num_tokens, 1, stride, offs, mask)


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def ordered_verify_kernel(
    # inputs: q, k [N, H, K]; v [N, HV, V]; a, b [N, HV]; A_log, dt_bias [HV]
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr,
    # in-out: state [S, HV, V, K]; ring k [S, H, R, K], u [S, HV, R, V], cum_log_decay [S, HV, R]
    state_ptr, ring_k_ptr, ring_u_ptr, ring_decay_ptr,
    # output [N, HV, V]
    out_ptr,
    # metadata: cursors [S]; cu_seqlens [B + 1]; slots, is_fold [B], is_fold or None
    ring_start_ptr, history_len_ptr, cu_seqlens_ptr, slots_ptr, is_fold_ptr,
    num_rows, num_requests, scale, beta_scale,
    # strides of all dimensions but the last, which are 1; gates: those of a and b
    q_strides, k_strides, v_strides, gate_strides,
    state_strides, ring_k_strides, ring_u_strides, ring_decay_strides, out_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    RING: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr,
    STATE_OPERAND: tl.constexpr, RING_OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    USE_L2NORM: tl.constexpr,
):  # fmt: skip
    """One program for a request, a value head and a share of the tiles of its value rows."""
    hv, request = tl.program_id(0) % HV, tl.program_id(0) // HV
    h, hv_offs = (hv // (HV // H)).to(tl.int64), hv.to(tl.int64)
    PARTS: tl.constexpr = K // BLOCK_K
    tl.static_assert(K % BLOCK_K == 0 and V % BLOCK_V == 0)
    share = tl.cdiv(V // BLOCK_V, tl.num_programs(1))
    first_tile = tl.program_id(1) * share
    last_tile = tl.minimum(first_tile + share, V // BLOCK_V)
    first = tl.load(cu_seqlens_ptr + request)
    num_tokens = tl.load(cu_seqlens_ptr + request + 1) - first
    rows_end = tl.load(cu_seqlens_ptr + num_requests)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    clear_rows(
        out_ptr + hv_offs * out_strides[1], first, num_tokens, rows_end, slot, request, num_rows,
        num_requests, out_strides[0], first_tile, last_tile, BLOCK_V,
    )  # fmt: skip
    is_fold = False
    if is_fold_ptr is not None:
        is_fold = tl.load(is_fold_ptr + request) != 0
    if (slot < 0) | ((num_tokens <= 0) & (is_fold == 0)):
        return

    state_ptr += slot * state_strides[0] + hv_offs * state_strides[1]
    ring_k_ptr += slot * ring_k_strides[0] + h * ring_k_strides[1]
    ring_u_ptr += slot * ring_u_strides[0] + hv_offs * ring_u_strides[1]
    ring_decay_ptr += slot * ring_decay_strides[0] + hv_offs * ring_decay_strides[1]
    for tile in range(first_tile, last_tile):
        prefetch(state_ptr, tile * BLOCK_V, state_strides[2], K, LINES)
    ring_start = tl.load(ring_start_ptr + slot).to(tl.int32)
    history_len = tl.load(history_len_ptr + slot).to(tl.int32)
    if is_fold:
        fold_first(
            state_ptr, ring_k_ptr, ring_u_ptr, ring_decay_ptr, ring_start, history_len,
            state_strides[2], ring_k_strides[2], ring_u_strides[2], first_tile, last_tile, K, RING,
            WINDOW, BLOCK_K, BLOCK_V, RING_OPERAND, PRECISION,
        )  # fmt: skip
        ring_start += history_len
        history_len *= 0

    # Places are those of the window: its stored rows, then the tokens of this step.
    places, tokens = tl.arange(0, WINDOW), tl.arange(0, TOKENS)
    is_stored, is_token = places < history_len, tokens < num_tokens
    place_token = places - history_len
    is_new = (place_token >= 0) & (place_token < num_tokens)
    place_token = tl.where(is_new, place_token, 0)
    ring_rows = (ring_start + places) & (RING - 1)
    first_row = first.to(tl.int64)
    k_rows = k_ptr + (first_row + place_token) * k_strides[0] + h * k_strides[1]
    q_rows = q_ptr + (first_row + tokens) * q_strides[0] + h * q_strides[1]
    key_rows = ring_k_ptr + ring_rows * ring_k_strides[2]
    appends = (hv % (HV // H) == 0) & (first_tile == 0)  # one program of a key head
    own, asked, keys, queries = multiply_keys(
        k_rows, q_rows, key_rows, is_new, is_token, is_stored, appends, PARTS, BLOCK_K,
        STATE_OPERAND, RING_OPERAND, PRECISION, USE_L2NORM,
    )  # fmt: skip
    rows = first_row + place_token
    log_decay, beta = load_gates(
        a_ptr + rows * gate_strides[0] + hv, b_ptr + rows * gate_strides[1] + hv,
        A_log_ptr + hv, dt_bias_ptr + hv, is_new, beta_scale,
    )  # fmt: skip
    decay = tl.load(ring_decay_ptr + ring_rows, mask=is_stored, other=0.0)
    decay, token_decay = add_decays(log_decay, decay, history_len, num_tokens, TOKENS)
    if first_tile == 0:
        tl.store(ring_decay_ptr + ring_rows, decay, mask=is_new)
    is_before = is_new[:, None] & (places[None, :] < places[:, None])
    coupling = tl.trans(weigh(own, decay, decay, is_before) * beta[:, None])
    is_seen = places[None, :] <= (history_len + tokens)[:, None]
    mix = weigh(asked, token_decay, decay, is_seen & is_token[:, None]).to(RING_OPERAND)

    v_offs = tl.arange(0, BLOCK_V)
    v_rows = v_ptr + (first_row + place_token) * v_strides[0] + hv_offs * v_strides[1]
    out_rows = out_ptr + (first_row + tokens) * out_strides[0] + hv_offs * out_strides[1]
    u_rows = ring_u_ptr + ring_rows * ring_u_strides[2]
    state_offs = v_offs[:, None] * state_strides[2] + tl.arange(0, BLOCK_K)[None, :]
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        tile_offs = tile * BLOCK_V + v_offs
        tile_ptr = state_ptr + tl.cast(tile * BLOCK_V, tl.int64) * state_strides[2]
        u_ptrs = u_rows[:, None] + tile_offs[None, :]
        u = tl.load(u_ptrs, mask=is_stored[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_rows[:, None] + tile_offs[None, :], mask=is_new[:, None], other=0.0)
        told = tl.zeros([WINDOW, BLOCK_V], tl.float32)
        y = tl.zeros([TOKENS, BLOCK_V], tl.float32)
        for i in tl.static_range(PARTS):
            state = tl.trans(tl.load(tile_ptr + i * BLOCK_K + state_offs).to(STATE_OPERAND))
            told = tl.dot(keys[i], state, told, input_precision=PRECISION)
            y = tl.dot(queries[i], state, y, input_precision=PRECISION)
        rest = beta[:, None] * (v.to(tl.float32) - told * tl.exp(decay)[:, None])
        u = solve_in_order(rest, coupling, u, history_len, num_tokens, ring_u_ptr.dtype.element_ty)
        y *= tl.exp(token_decay)[:, None]
        y = tl.dot(mix, u.to(RING_OPERAND), y, input_precision=PRECISION) * scale
        y_ptrs = out_rows[:, None] + tile_offs[None, :]
        tl.store(y_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_token[:, None])
        tl.store(u_ptrs, u.to(ring_u_ptr.dtype.element_ty), mask=is_new[:, None])
