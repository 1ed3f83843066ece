"""Verify for batches whose cursors are keyed by batch row, as some engines keep them.

All requests have the same number of rows, and cursors belong to the rows of the batch, not to the
slots of the pools. Arithmetic, kernel and reference are those of `verify`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybridspec.ops._backends import choose_backend
from hybridspec.ops._checks import Dims, check, check_devices, check_dtype, check_last_stride
from hybridspec.ops._library import register
from hybridspec.ops.gated_delta_rule import launch, launch_cuda, reference
from hybridspec.ops.gated_delta_rule.choice import verify_backends
from hybridspec.ops.gated_delta_rule.contracts import (
    FLOATS,
    WIDE,
    check_options,
    check_pools,
)
from hybridspec.ops.ring.contracts import check_threshold
from hybridspec.ops.ring.view import RingView, check_window

__all__ = ["verify_rows"]


def verify_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_cum_log_decay: Tensor,
    history_len: Tensor,
    *,
    ring_start: Tensor | None = None,
    slots: Tensor | None = None,
    max_window: int = 16,
    fold_threshold: int | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    beta_scale: float = 1.0,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Run `verify` on T rows of each request, with cursors of the batch rows; cursors stay.

    Equation and appended rows are those of `verify`. Request b folds where it has a slot and

        history_len[b] >= fold_threshold

    Args:
        q: queries, [B, T, H, K]; last stride 1; in.
        k: keys, [B, T, H, K], dtype of `v`; last stride 1; in.
        v: values, [B, T, HV, V], HV a multiple of H, bf16, fp16, fp32 or fp64; last stride 1; in.
        a: decay inputs, [B, T, HV], any of these dtypes; last stride 1; in.
        b: write strength inputs, [B, T, HV], any of these dtypes; last stride 1; in.
        A_log: [HV], any of these dtypes; in.
        dt_bias: [HV], any of these dtypes; in.
        state: checkpoints, [S, HV, V, K], any of these dtypes; last stride 1; in-out.
        ring_k: normalised keys, [S, H, R, K]; last stride 1; in-out.
        ring_u: corrected values, [S, HV, R, V]; last stride 1; in-out.
        ring_cum_log_decay: log-decay since the checkpoint, [S, HV, R], fp32 or fp64; in-out.
        history_len: live ring rows of each request, [B], int32; in.
        ring_start: first live ring row of each request, [B], int32; None: row 0; in.
        slots: slot of each request, negative = padding, no slot twice, [B], int32; None: request b
            has slot b; in.
        max_window: most live rows (W).
        fold_threshold: fewest live rows of a request that folds; None: nobody folds.
        scale: factor of the outputs; None is K^-0.5.
        use_qk_l2norm: whether q and k are first scaled to length one per head.
        beta_scale: 2 lets the state have negative eigenvalues.
        out: where to write, [B, T, HV, V], any of these dtypes; rows of padding keep what they
            hold; out.
        backend: "auto", "cuda", "triton" or "reference".

    Returns:
        `out`, or [B, T, HV, V] in the dtype of `v` with zeros in rows of padding.

    Raises:
        TypeError: for a dtype that is not supported.
        UnsupportedError: if the backend asked for cannot serve the call; the message says why.
        ValueError: for a wrong shape, stride, ring capacity, option or backend.

    Numerics:
        As `verify`; A_log and dt_bias are widened, never rounded.

    Source:
        README.md of this package.
    """
    ring = RingView(
        k=ring_k,
        u=ring_u,
        cum_log_decay=ring_cum_log_decay,
        ring_start=history_len if ring_start is None else ring_start,
        history_len=history_len,
        max_window=max_window,
    )
    _check(q, k, v, a, b, A_log, dt_bias, state, ring, slots, out)
    check_options(scale, use_qk_l2norm, beta_scale)
    if fold_threshold is not None:
        check_threshold(fold_threshold)
    num_tokens = v.shape[1]
    check_window(ring, num_tokens)
    if out is None:
        target = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    else:
        target = out if _is_packed(out) else out.contiguous()
    _verify_rows_op(
        *(part.flatten(0, 1) for part in (q, k, v, a, b)), A_log, dt_bias, state, ring_k, ring_u,
        ring_cum_log_decay, history_len, ring_start, slots, max_window, fold_threshold,
        target.flatten(0, 1), out is None, k.shape[3] ** -0.5 if scale is None else scale,
        use_qk_l2norm, beta_scale, num_tokens, backend,
    )  # fmt: skip
    return target if out is None or out is target else out.copy_(target)


def _is_packed(out: Tensor) -> bool:
    """Whether all rows of a batch are equally far apart, with a last stride of 1."""
    batch, num_tokens = out.shape[:2]
    is_even = batch < 2 or num_tokens < 2 or out.stride(0) == num_tokens * out.stride(1)
    return is_even and out.stride(3) == 1


def _check(q, k, v, a, b, A_log, dt_bias, state, ring, slots, out) -> None:
    dims: Dims = {}
    for name, tensor, spec in (
        ("k", k, "B T H K"),
        ("q", q, "B T H K"),
        ("v", v, "B T HV V"),
        ("a", a, "B T HV"),
        ("b", b, "B T HV"),
        ("A_log", A_log, "HV"),
        ("dt_bias", dt_bias, "HV"),
        ("state", state, "S HV V K"),
    ):
        check(name, tensor, spec, dims)
        check_dtype(name, tensor, *FLOATS)
    for name, tensor in (("q", q), ("k", k)):
        check_dtype(name, tensor, v.dtype)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b)):
        check_last_stride(name, tensor)
    check_pools(state, ring, dims["B"])
    check("ring.k", ring.k, "S H R K", dims)
    check("ring.u", ring.u, "S HV R V", dims)
    if slots is not None:
        check("slots", slots, "B", dims)
        check_dtype("slots", slots, torch.int32)
    if out is not None:
        check("out", out, "B T HV V", dims)
        check_dtype("out", out, *FLOATS)
    check_devices(
        v=v, q=q, k=k, a=a, b=b, A_log=A_log, dt_bias=dt_bias, state=state, slots=slots, out=out
    )


def _verify_rows(*args) -> None:
    *tensors, ring_k, ring_u, cum, history_len, ring_start, slots, max_window = args[:15]
    fold_threshold, out, is_padding_zeroed, scale, use_qk_l2norm, beta_scale = args[15:21]
    num_tokens, backend = args[21:]
    history_len = history_len.contiguous()
    ring = RingView(
        k=ring_k,
        u=ring_u,
        cum_log_decay=cum,
        ring_start=history_len,
        history_len=history_len,
        max_window=max_window,
    )
    cursors = launch.RowCursors(
        history_len=history_len,
        ring_start=None if ring_start is None else ring_start.contiguous(),
        fold_threshold=fold_threshold,
        is_padding_zeroed=is_padding_zeroed,
    )
    slots = None if slots is None else slots.contiguous()
    q, k, v, a, b, A_log, dt_bias, state = tensors
    A_log, dt_bias = A_log.contiguous(), dt_bias.contiguous()
    chosen = choose_backend(
        "gated_delta_rule.verify_rows", backend, verify_backends(q),
        q, k, v, a, b, state, ring, out, num_tokens,
    )  # fmt: skip
    if chosen != "reference":
        run = launch_cuda.verify if chosen == "cuda" else launch.verify
        run(
            q, k, v, a, b, A_log, dt_bias, state, ring, None, slots, None, out, scale,
            use_qk_l2norm, beta_scale, num_tokens, by_row=cursors,
        )  # fmt: skip
        return
    slots, bounds, is_fold, ring = _keyed_by_slot(cursors, slots, ring, num_tokens)
    is_live = slots >= 0
    # The reference zeroes rows of padding; rows to keep are kept by writing elsewhere.
    keeps = not is_padding_zeroed and not bool(is_live.all())
    target = torch.empty_like(out) if keeps else out
    reference.verify(
        q, k, v, a, b, _widened(A_log), _widened(dt_bias), state, ring, bounds, slots, is_fold,
        target, scale, use_qk_l2norm, beta_scale, num_tokens,
    )  # fmt: skip
    if keeps:
        is_mine = is_live.repeat_interleave(num_tokens).view(-1, 1, 1)
        out.copy_(torch.where(is_mine, target, out))


def _keyed_by_slot(
    cursors: launch.RowCursors, slots: Tensor | None, ring: RingView, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor | None, RingView]:
    """Return slots, cu_seqlens, is_fold and the ring as `verify` takes them."""
    history_len, ring_start = ring.history_len, cursors.ring_start
    batch, num_slots = history_len.shape[0], ring.k.shape[0]
    if slots is None:
        slots = torch.arange(batch, dtype=torch.int32, device=history_len.device)
    if ring_start is None:
        ring_start = torch.zeros_like(history_len)
    is_live = slots >= 0
    by_slot = history_len.new_zeros((2, num_slots + 1))  # the last one is for padding
    by_slot[:, torch.where(is_live, slots, num_slots)] = torch.stack((ring_start, history_len))
    starts, lengths = by_slot[:, :num_slots].unbind()
    is_fold = None
    if cursors.fold_threshold is not None:
        is_fold = (is_live & (history_len >= cursors.fold_threshold)).to(torch.int8)
    bounds = num_tokens * torch.arange(batch + 1, dtype=torch.int32, device=slots.device)
    return slots, bounds, is_fold, replace(ring, ring_start=starts, history_len=lengths)


def _widened(parameter: Tensor) -> Tensor:
    return parameter if parameter.dtype in WIDE else parameter.float()


_verify_rows_op = register(
    "gated_delta_rule_verify_rows(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, "
    "Tensor dt_bias, Tensor(a!) state, Tensor(b!) ring_k, Tensor(c!) ring_u, "
    "Tensor(d!) ring_cum_log_decay, Tensor history_len, Tensor? ring_start, Tensor? slots, "
    "int max_window, int? fold_threshold, Tensor(e!) out, bool is_padding_zeroed, float scale, "
    "bool use_qk_l2norm, float beta_scale, int num_tokens, str backend)",
    _verify_rows,
)
