"""Public functions on a layer's state and ring: checks, allocation, and the registered ops."""

from __future__ import annotations

import torch
from torch import Tensor

from .._backends import always, choose_backend
from .._checks import Dims, check, check_last_stride
from .._library import register
from . import prefill as reference_prefill
from . import reference
from .ring import RingView

__all__ = ["fold", "materialize", "prefill", "verify"]

_CANDIDATES = {"reference": always}


def _verify(
    q, k, v, a, b, A_log, dt_bias, state, ring_k, ring_u, ring_g, ring_start, history_len,
    cu_seqlens, slots, is_fold, out, max_verify_tokens, max_window, scale, use_qk_l2norm,
    beta_scale, backend,
):  # fmt: skip
    choose_backend("gated_delta_rule.verify", backend, _CANDIDATES)
    ring = RingView(
        k=ring_k,
        u=ring_u,
        cum_log_decay=ring_g,
        ring_start=ring_start,
        history_len=history_len,
        max_window=max_window,
    )
    reference.verify(
        q, k, v, a, b, A_log, dt_bias, state, ring, cu_seqlens, slots, is_fold, out, scale,
        use_qk_l2norm, beta_scale,
    )  # fmt: skip


def _prefill(
    q, k, v, a, b, A_log, dt_bias, state, history_len, cu_seqlens, slots, out, max_seqlen,
    scale, use_qk_l2norm, beta_scale, chunk_size, backend,
):  # fmt: skip
    choose_backend("gated_delta_rule.prefill", backend, _CANDIDATES)
    reference_prefill.prefill(
        q, k, v, a, b, A_log, dt_bias, state, history_len, cu_seqlens, slots, out, scale,
        use_qk_l2norm, beta_scale, chunk_size,
    )  # fmt: skip


def _fold(state, ring_k, ring_u, ring_g, ring_start, history_len, slots, is_fold, backend):
    choose_backend("gated_delta_rule.fold", backend, _CANDIDATES)
    ring = RingView(
        k=ring_k, u=ring_u, cum_log_decay=ring_g, ring_start=ring_start, history_len=history_len
    )
    reference.fold(state, ring, slots, is_fold)


def _materialize(
    state, ring_k, ring_u, ring_g, ring_start, history_len, slots, out_slots, num_rows, backend
):
    choose_backend("gated_delta_rule.materialize", backend, _CANDIDATES)
    ring = RingView(
        k=ring_k, u=ring_u, cum_log_decay=ring_g, ring_start=ring_start, history_len=history_len
    )
    reference.materialize(state, ring, slots.tolist(), out_slots.tolist(), num_rows.tolist())


_verify_op = register(
    "gated_delta_rule_verify(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, "
    "Tensor dt_bias, Tensor(a!) state, Tensor(b!) ring_k, Tensor(c!) ring_u, "
    "Tensor(d!) ring_cum_log_decay, Tensor ring_start, Tensor history_len, Tensor cu_seqlens, "
    "Tensor slots, Tensor? is_fold, Tensor(e!) out, int max_verify_tokens, int max_window, "
    "float scale, bool use_qk_l2norm, float beta_scale, str backend)",
    _verify,
)
_prefill_op = register(
    "gated_delta_rule_prefill(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, "
    "Tensor dt_bias, Tensor(a!) state, Tensor history_len, Tensor cu_seqlens, Tensor slots, "
    "Tensor(b!) out, int max_seqlen, float scale, bool use_qk_l2norm, float beta_scale, "
    "int chunk_size, str backend)",
    _prefill,
)
_fold_op = register(
    "gated_delta_rule_fold(Tensor(a!) state, Tensor ring_k, Tensor ring_u, "
    "Tensor ring_cum_log_decay, Tensor ring_start, Tensor history_len, Tensor slots, "
    "Tensor is_fold, str backend)",
    _fold,
)
_materialize_op = register(
    "gated_delta_rule_materialize(Tensor(a!) state, Tensor ring_k, Tensor ring_u, "
    "Tensor ring_cum_log_decay, Tensor ring_start, Tensor history_len, Tensor slots, "
    "Tensor out_slots, Tensor num_rows, str backend)",
    _materialize,
)


def _check_rows(q, k, v, a, b, A_log, dt_bias, state, ring, cu_seqlens, slots, out) -> Tensor:
    dims: Dims = {}
    check("k", k, "N H K", dims)
    check("q", q, "N H K", dims)
    check("v", v, "N HV V", dims)
    check("a", a, "N HV", dims)
    check("b", b, "N HV", dims)
    check("A_log", A_log, "HV", dims)
    check("dt_bias", dt_bias, "HV", dims)
    check("state", state, "S HV V K", dims)
    check("ring.k", ring.k, "S H R K", dims)
    check("ring.u", ring.u, "S HV R V", dims)
    check("ring.cum_log_decay", ring.cum_log_decay, "S HV R", dims)
    check("slots", slots, "B", dims)
    if dims["HV"] % dims["H"]:
        raise ValueError(f"v: expected heads a multiple of k's {dims['H']}, got {dims['HV']}")
    for name, tensor in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b)):
        check_last_stride(name, tensor)
    if out is None:
        return torch.empty(v.shape, dtype=v.dtype, device=v.device)
    check("out", out, "N HV V", dims)
    return out


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
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Run prompt rows from the slots' states and store the final states."""
    out = _check_rows(q, k, v, a, b, A_log, dt_bias, state, ring, cu_seqlens, slots, out)
    _prefill_op(
        q, k, v, a, b, A_log, dt_bias, state, ring.history_len, cu_seqlens, slots, out, max_seqlen,
        k.shape[2] ** -0.5 if scale is None else scale, use_qk_l2norm, beta_scale, chunk_size,
        backend,
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
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Check T_b rows of each request and append them behind the live window."""
    out = _check_rows(q, k, v, a, b, A_log, dt_bias, state, ring, cu_seqlens, slots, out)
    _verify_op(
        q, k, v, a, b, A_log, dt_bias, state, ring.k, ring.u, ring.cum_log_decay, ring.ring_start,
        ring.history_len, cu_seqlens, slots, is_fold, out, max_verify_tokens, ring.max_window,
        k.shape[2] ** -0.5 if scale is None else scale, use_qk_l2norm, beta_scale, backend,
    )  # fmt: skip
    return out


def fold(
    state: Tensor, ring: RingView, slots: Tensor, *, is_fold: Tensor, backend: str = "auto"
) -> None:
    """Fold the live windows of the marked requests into their checkpoints; cursors stay."""
    _fold_op(
        state, ring.k, ring.u, ring.cum_log_decay, ring.ring_start, ring.history_len, slots,
        is_fold, backend,
    )  # fmt: skip


def materialize(
    state: Tensor,
    ring: RingView,
    slots: Tensor,
    out_slots: Tensor,
    num_rows: Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Write the state after the first live rows of each slot into another slot."""
    _materialize_op(
        state, ring.k, ring.u, ring.cum_log_decay, ring.ring_start, ring.history_len, slots,
        out_slots, num_rows, backend,
    )  # fmt: skip
