"""Public functions on a layer's state and ring: contract, output allocation, operator call."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._backends import choose_backend
from hybridspec.ops._checks import check_devices, check_option
from hybridspec.ops._library import register
from hybridspec.ops._triton_support import triton_or_reference
from hybridspec.ops.gated_delta_rule import fla, launch, launch_cuda, reference
from hybridspec.ops.gated_delta_rule import prefill as reference_prefill
from hybridspec.ops.gated_delta_rule.choice import prefill_backends, verify_backends
from hybridspec.ops.gated_delta_rule.contracts import (
    check_is_fold,
    check_options,
    check_pools,
    check_rows,
)
from hybridspec.ops.ring.contracts import check_marks
from hybridspec.ops.ring.view import RingView, check_window

__all__ = ["fold", "materialize", "prefill", "verify"]

_advance_backends = triton_or_reference(launch.explain_advance)
_ROWS = "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias"
_RING = "Tensor ring_start, Tensor history_len, int max_window"
_OPTIONS = "float scale, bool use_qk_l2norm, float beta_scale"


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    ring: RingView,
    cu_seqlens: Tensor,
    slots: Tensor,
    *,
    max_seqlen: int,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    beta_scale: float = 1.0,
    chunk_size: int = 64,
    state_scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Run prompt rows from the states of their slots and store the final states.

    Ring rows and cursors are neither read for values nor written. A prompt may come in parts, each
    continuing from the state that the one before stored. The equation, per row and value head:

        S <- e^{g_t} S;  u_t = beta_t (v_t - S k_t);  S <- S + u_t k_t^T;  y_t = scale S q_t
        g_t = -exp(A_log) softplus(a_t + dt_bias),  beta_t = beta_scale sigmoid(b_t)

    Args:
        q: queries, [N, H, K], packed by request; last stride 1; in.
        k: keys, [N, H, K], dtype of `v`; last stride 1; in.
        v: values, [N, HV, V], HV a multiple of H, bf16, fp16, fp32 or fp64; last stride 1; in.
        a: decay inputs, [N, HV], any of these dtypes; last stride 1; in.
        b: write strength inputs, [N, HV], any of these dtypes; last stride 1; in.
        A_log: [HV], any of these dtypes; in.
        dt_bias: [HV], any of these dtypes; in.
        state: checkpoints, [S, HV, V, K], any of these dtypes or int8; last stride 1; in-out.
        ring: ring of the layer; its slots must have no live rows; in.
        cu_seqlens: row bounds of the requests, [B+1], int32; contiguous; in.
        slots: slot of each request, -1 = padding, no slot twice, [B], int32; contiguous; in.
        max_seqlen: most rows of one request.
        scale: factor of the outputs; None is K^-0.5.
        use_qk_l2norm: whether q and k are first scaled to length one per head.
        beta_scale: 2 lets the state have negative eigenvalues.
        chunk_size: rows that are solved at once.
        state_scale: factors of an int8 state, [S, HV, V, K / 32], bf16; last stride 1; in-out.
        out: where to write, [N, HV, V]; last stride 1; out.
        backend: "auto", "fla" or "reference".

    Returns:
        [N, HV, V] in the dtype of `v`; zeros in rows that belong to no slot.

    Raises:
        TypeError: for a dtype or an option of a kind that is not supported.
        UnsupportedError: if the backend asked for cannot serve the call; the message says why.
        ValueError: for a wrong shape, stride, device, option or backend, or (reference) a slot
            with live rows or one that occurs twice, or more rows in a request than `max_seqlen`.

    Numerics:
        fp32 (fp64 if q, a or state is). The state is rounded once, at the end (int8 as in
        `fold`); outputs once. Chunks are solved by substitution, decays are exponentials
        of differences <= 0.
        "fla" (flash-linear-attention) accumulates in fp32, and rounds the normed q and k, the
        inverse of a chunk's system, the corrections and the state that each chunk reads to the
        dtype of q; the inverse is computed in tf32.

    Source:
        Gated Delta Networks (Yang et al. 2025, arXiv:2412.06464), section 3.3 and equation 10.
    """
    check_rows(q, k, v, a, b, A_log, dt_bias, state, ring, cu_seqlens, slots, out, state_scale)
    check_options(scale, use_qk_l2norm, beta_scale)
    check_option("max_seqlen", max_seqlen, int, low=0)
    check_option("chunk_size", chunk_size, int, low=1)
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    _prefill_op(
        q, k, v, a, b, A_log, dt_bias, state, ring.history_len, cu_seqlens, slots, out,
        k.shape[2] ** -0.5 if scale is None else scale, use_qk_l2norm, beta_scale, chunk_size,
        max_seqlen, state_scale, backend,
    )  # fmt: skip
    return out


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    ring: RingView,
    cu_seqlens: Tensor,
    slots: Tensor,
    *,
    max_verify_tokens: int,
    is_fold: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    beta_scale: float = 1.0,
    state_scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Run the rows to verify and append them behind the live windows; cursors stay.

    Checkpoints are written only where `is_fold` is set: they then take in the live window, which
    holds committed rows only. With S_h the state after the window and c_t = g_1 + ... + g_t:

        u_t = beta_t (v_t - e^{c_t} S_h k_t) - sum_{s<t} beta_t e^{c_t-c_s} (k_t.k_s) u_s
        y_t = scale (e^{c_t} S_h q_t + sum_{s<=t} e^{c_t-c_s} (q_t.k_s) u_s)

    Appended at ring row (ring_start + history_len + t) mod R: u_t, k_t, and c_t plus the window's
    cumulative log-decay, or c_t alone where the step folds.

    Args:
        q: queries, [N, H, K], packed by request; last stride 1; in.
        k: keys, [N, H, K], dtype of `v`; last stride 1; in.
        v: values, [N, HV, V], HV a multiple of H, bf16, fp16, fp32 or fp64; last stride 1; in.
        a: decay inputs, [N, HV], any of these dtypes; last stride 1; in.
        b: write strength inputs, [N, HV], any of these dtypes; last stride 1; in.
        A_log: [HV], any of these dtypes; in.
        dt_bias: [HV], any of these dtypes; in.
        state: checkpoints, [S, HV, V, K], any of these dtypes or int8; last stride 1; in-out.
        ring: ring of the layer: rows in-out, cursors in.
        cu_seqlens: row bounds of the requests, [B+1], int32; contiguous; in.
        slots: slot of each request, -1 = padding, no slot twice, [B], int32; contiguous; in.
        max_verify_tokens: most rows of one request, at most `ring.max_window`.
        is_fold: which requests fold, [B], int8, from `decide_folds`; it may be set only where the
            request has rows. None: nobody folds. A step that folded must be committed; in.
        scale: factor of the outputs; None is K^-0.5.
        use_qk_l2norm: whether q and k are first scaled to length one per head.
        beta_scale: 2 lets the state have negative eigenvalues.
        state_scale: factors of an int8 state, [S, HV, V, K / 32], bf16; last stride 1; in-out.
        out: where to write, [N, HV, V]; last stride 1; out.
        backend: "auto", "cuda", "triton" or "reference".

    Returns:
        [N, HV, V] in the dtype of `v`; zeros in rows that belong to no slot.

    Raises:
        TypeError: for a dtype or an option of a kind that is not supported.
        UnsupportedError: if the backend asked for cannot serve the call; the message says why.
        ValueError: for a wrong shape, stride, device, ring capacity, option or backend, or
            (reference) a slot that occurs twice, or more rows in a request than
            `max_verify_tokens`.

    Numerics:
        fp32 (fp64 if q, a or state is). Outputs are rounded once, to the dtype of `out`; appended
        rows once, to those of the ring; a folded state once, to its own (int8 as in `fold`; the
        step's own outputs are those of the state before that rounding). Decays are exponentials
        of differences <= 0; the triangular system is solved by substitution.
        "triton" accumulates in fp32 and, with 16-bit activations, rounds the coefficients of its
        matrix products to the dtype that they multiply: that of q for new rows, of the state, and
        of the ring (fp32 tensors are multiplied in tf32); a fold rounds the decayed u once more.
        With fp32 activations every product is full fp32.

    Source:
        The delta rule of Gated Delta Networks (Yang et al. 2025, arXiv:2412.06464), equation 10;
        README.md of this package derives the form used here.
    """
    check_rows(q, k, v, a, b, A_log, dt_bias, state, ring, cu_seqlens, slots, out, state_scale)
    check_options(scale, use_qk_l2norm, beta_scale)
    check_window(ring, max_verify_tokens)
    if is_fold is not None:
        check_is_fold(is_fold, slots)
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    _verify_op(
        q, k, v, a, b, A_log, dt_bias, state, ring.k, ring.u, ring.cum_log_decay, ring.ring_start,
        ring.history_len, ring.max_window, cu_seqlens, slots, is_fold, out,
        k.shape[2] ** -0.5 if scale is None else scale, use_qk_l2norm, beta_scale,
        max_verify_tokens, state_scale, backend,
    )  # fmt: skip
    return out


def fold(
    state: Tensor,
    ring: RingView,
    slots: Tensor,
    *,
    is_fold: Tensor,
    state_scale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Take the live windows of the marked requests into their checkpoints; cursors stay.

    S <- e^{G_P} S + sum_j e^{G_P - G_j} u_j k_j^T over the P live rows. `commit` with the same
    `is_fold` then empties the windows.

    Args:
        state: checkpoints, [S, HV, V, K]; in-out.
        ring: ring of the layer; in.
        slots: slot of each request, -1 = padding, no slot twice, [B], int32; contiguous; in.
        is_fold: which requests fold, [B], int8; contiguous; in.
        state_scale: factors of an int8 state, [S, HV, V, K / 32], bf16; in-out.
        backend: "auto", "triton" or "reference".

    Raises:
        TypeError: for a dtype that is not supported.
        UnsupportedError: if the backend asked for cannot serve the call; the message says why.
        ValueError: for a wrong shape, stride, device, ring or backend, or (reference) a slot that
            would be written twice.

    Numerics:
        fp32 (fp64 if the state is); the state is rounded once. An int8 state is the product of
        integers and of one factor for 32 neighbours along K, which makes the largest of them 127:
        scale = bf16(max |x| / 127), state = round(x / scale). A group with a value that is not
        finite reads as NaN.

    Source:
        README.md of this package.
    """
    check_pools(state, ring, state_scale=state_scale)
    check_marks({}, slots=slots, is_fold=is_fold)
    check_devices(state=state, slots=slots, is_fold=is_fold)
    _fold_op(
        state, ring.k, ring.u, ring.cum_log_decay, ring.ring_start, ring.history_len,
        ring.max_window, slots, is_fold, state_scale, backend,
    )  # fmt: skip


def materialize(
    state: Tensor,
    ring: RingView,
    slots: Tensor,
    out_slots: Tensor,
    num_rows: Tensor,
    *,
    state_scale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write the state after the first live rows of a slot into a slot; cursors stay.

    state[out_slot] <- e^{G_n} S + sum_{j<=n} e^{G_n - G_j} u_j k_j^T, n = num_rows

    Args:
        state: checkpoints, [S, HV, V, K]; in-out.
        ring: ring of the layer; in.
        slots: slot to read of each request, [B], int32; contiguous; in.
        out_slots: slot to write, which may be the one that is read, but none that another request
            reads or writes, [B], int32; pairs with a -1 are skipped; in.
        num_rows: live rows to take in, cut to 0..history_len, [B], int32; contiguous; in.
        state_scale: factors of an int8 state, [S, HV, V, K / 32], bf16; in-out.
        backend: "auto", "triton" or "reference".

    Raises:
        TypeError: for a dtype that is not supported.
        UnsupportedError: if the backend asked for cannot serve the call; the message says why.
        ValueError: for a wrong shape, stride, device, ring or backend, or (reference) a slot that
            would be written twice.

    Numerics:
        As `fold`.

    Source:
        README.md of this package.
    """
    check_pools(state, ring, state_scale=state_scale)
    check_marks({}, slots=slots, out_slots=out_slots, num_rows=num_rows)
    check_devices(state=state, slots=slots, out_slots=out_slots, num_rows=num_rows)
    _materialize_op(
        state, ring.k, ring.u, ring.cum_log_decay, ring.ring_start, ring.history_len,
        ring.max_window, slots, out_slots, num_rows, state_scale, backend,
    )  # fmt: skip


def _ring(
    k: Tensor, u: Tensor, cum: Tensor, ring_start: Tensor, history_len: Tensor, max_window: int
) -> RingView:
    return RingView(
        k=k,
        u=u,
        cum_log_decay=cum,
        ring_start=ring_start,
        history_len=history_len,
        max_window=max_window,
    )


def _prefill(q: Tensor, *args) -> None:
    *call, max_seqlen, state_scale, backend = args
    chosen = choose_backend(
        "gated_delta_rule.prefill", backend, prefill_backends(q),
        q, *call[:7], call[9], call[10], call[-1],
    )  # fmt: skip
    module = fla if chosen == "fla" else reference_prefill
    module.prefill(q, *call, max_seqlen, state_scale)


def _verify(*args) -> None:
    *call, max_verify_tokens, state_scale, backend = args
    tensors, ring, rest = call[:8], _ring(*call[8:14]), call[14:]
    q, k, v, a, b, _, _, state = tensors
    chosen = choose_backend(
        "gated_delta_rule.verify", backend, verify_backends(q),
        q, k, v, a, b, state, ring, rest[3], max_verify_tokens,
    )  # fmt: skip
    if chosen == "cuda":
        launch_cuda.verify(*tensors, ring, *rest, max_verify_tokens, state_scale)
    elif chosen == "triton":
        launch.verify(*tensors, ring, *rest, max_verify_tokens)
    else:
        reference.verify(*tensors, ring, *rest, max_verify_tokens, state_scale)


def _fold(state: Tensor, *args) -> None:
    *ring, slots, is_fold, state_scale, backend = args
    view = _ring(*ring)
    if (
        choose_backend("gated_delta_rule.fold", backend, _advance_backends(state), state, view)
        == "triton"
    ):
        launch.advance(state, view, slots, slots, is_fold, is_flag=True)
    else:
        reference.fold(state, view, slots, is_fold, state_scale)


def _materialize(state: Tensor, *args) -> None:
    *ring, slots, out_slots, num_rows, state_scale, backend = args
    view = _ring(*ring)
    chosen = choose_backend(
        "gated_delta_rule.materialize", backend, _advance_backends(state), state, view
    )
    if chosen == "triton":
        launch.advance(state, view, slots, out_slots, num_rows, is_flag=False)
    else:
        reference.materialize(
            state, view, slots.tolist(), out_slots.tolist(), num_rows.tolist(), state_scale
        )


_prefill_op = register(
    f"gated_delta_rule_prefill({_ROWS}, Tensor(a!) state, Tensor history_len, Tensor cu_seqlens, "
    f"Tensor slots, Tensor(b!) out, {_OPTIONS}, int chunk_size, int max_seqlen, "
    "Tensor(c!)? state_scale, str backend)",
    _prefill,
)
_verify_op = register(
    f"gated_delta_rule_verify({_ROWS}, Tensor(a!) state, Tensor(b!) ring_k, Tensor(c!) ring_u, "
    f"Tensor(d!) ring_cum_log_decay, {_RING}, Tensor cu_seqlens, Tensor slots, Tensor? is_fold, "
    f"Tensor(e!) out, {_OPTIONS}, int max_verify_tokens, "
    "Tensor(f!)? state_scale, str backend)",
    _verify,
)
_fold_op = register(
    "gated_delta_rule_fold(Tensor(a!) state, Tensor ring_k, Tensor ring_u, "
    f"Tensor ring_cum_log_decay, {_RING}, Tensor slots, Tensor is_fold, "
    "Tensor(b!)? state_scale, str backend)",
    _fold,
)
_materialize_op = register(
    "gated_delta_rule_materialize(Tensor(a!) state, Tensor ring_k, Tensor ring_u, "
    f"Tensor ring_cum_log_decay, {_RING}, Tensor slots, Tensor out_slots, Tensor num_rows, "
    "Tensor(b!)? state_scale, str backend)",
    _materialize,
)
