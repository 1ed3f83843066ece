"""Verify for batches whose cursors are keyed by batch row, as some engines keep them.

All requests have the same number of rows, and cursors belong to the rows of the batch, not to the
slots of the pools. Arithmetic, kernel and reference are those of `verify`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops._backends import always
from hybridspec.ops._library import Backend, Written, register
from hybridspec.ops.gated_delta_rule import cpu
from hybridspec.ops.gated_delta_rule.api import VERIFY_BACKENDS
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State, is_packed
from hybridspec.ops.gated_delta_rule.contracts import check_verify_rows
from hybridspec.ops.ring.view import RingView

__all__ = ["verify_rows"]


def verify_rows(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state: Tensor, ring_k: Tensor, ring_u: Tensor, ring_cum_log_decay: Tensor, history_len: Tensor,
    *,
    ring_start: Tensor | None = None, slots: Tensor | None = None, max_window: int = 16,
    fold_threshold: int | None = None, scale: float | None = None, use_qk_l2norm: bool = True,
    beta_scale: float = 1.0, out: Tensor | None = None, has_token_decay: bool = False,
    padding: int = -1, zeroes_padding: bool = False, rand_seed: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
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
        ring_k: normalised keys, [S, H, R, K]; R is a power of two, or any number where there is no
            `ring_start`; last stride 1; in-out.
        ring_u: corrected values, [S, HV, R, V]; last stride 1; in-out.
        ring_cum_log_decay: log-decay since the checkpoint, [S, HV, R], fp32 or fp64; in-out.
        history_len: live ring rows of each request, [B], int32; in.
        ring_start: first live ring row of each request, [B], int32; None: row 0; in.
        slots: slot of each request, padding if at most `padding`, no slot twice, [B], int32; None:
            request b has slot b; in.
        max_window: most live rows (W).
        fold_threshold: fewest live rows of a request that folds; None: none folds.
        scale: factor of the outputs; None is K^-0.5.
        use_qk_l2norm: whether q and k are first scaled to length one per head.
        beta_scale: 2 lets the state have negative eigenvalues.
        out: where to write, [B, T, HV, V], any of these dtypes; rows of padding keep what they
            hold, or become zero; out.
        has_token_decay: whether `ring_cum_log_decay` holds the log-decay of each token alone.
        padding: largest number that is no slot, at least -1.
        zeroes_padding: whether rows of padding of a given `out` become zero.
        rand_seed: seed of stochastic rounding of folds into a 16-bit state, as in `verify`.
        backend: "auto", "cuda", "triton" or "reference".

    Returns:
        `out`, or [B, T, HV, V] in the dtype of `v` with zeros in rows of padding.

    Raises:
        TypeError: for a dtype that is not supported.
        UnsupportedError: if the requested backend does not support the call; the message says why.
        ValueError: for a wrong shape, stride, ring capacity, option or backend.

    Numerics:
        As `verify`; A_log and dt_bias are widened, never rounded.

    Source:
        README.md of this package.
    """
    if out is None:
        is_given, target = False, v.new_empty(v.shape) if isinstance(v, Tensor) else v
    else:
        is_given, target = not zeroes_padding, out if is_packed(out) else out.contiguous()
    _verify_rows(
        Rows(q, k, v, a, b, target),
        Gates(A_log, dt_bias, scale, use_qk_l2norm, beta_scale),
        State(state, None),
        RingView(
            ring_k, ring_u, ring_cum_log_decay, ring_start, history_len, max_window, has_token_decay
        ),
        FoldingBatch(
            None,
            slots,
            None,
            _num_tokens(v),
            fold_threshold,
            is_given,
            padding,
            rand_seed=rand_seed,
        ),  # fmt: skip
        backend=backend,
    )
    return target if out is None or out is target else out.copy_(target)


def _num_tokens(v: Tensor) -> int:
    return v.shape[1] if isinstance(v, Tensor) and v.dim() > 1 else 0


def _as_packed(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> tuple[Rows, Gates, State, RingView, FoldingBatch]:
    """Return the call as kernels take it: rows one after another, cursors and slots contiguous."""
    A_log, dt_bias, *options = gates
    cu_seqlens, slots, *others = batch
    return (
        Rows(*[part.flatten(0, 1) for part in rows]),
        Gates(A_log.contiguous(), dt_bias.contiguous(), *options),
        state,
        ring._replace(
            ring_start=_contiguous(ring.ring_start), history_len=ring.history_len.contiguous()
        ),
        FoldingBatch(cu_seqlens, _contiguous(slots), *others),
    )


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _backend(name: str) -> Backend:
    """A backend of `verify`, for rows that are not packed yet."""

    def explain(*call: Any) -> str | None:
        return VERIFY_BACKENDS[name].explain(*_as_packed(*call))

    def prepare(*call: Any) -> Callable[..., None]:
        prepared = VERIFY_BACKENDS[name].prepared(*_as_packed(*call))
        return lambda *call: prepared(*_as_packed(*call))

    return Backend.preparing(explain, prepare)


def _run_on_cpu(
    rows: Written[Rows], gates: Gates, state: Written[State], ring: Written[RingView],
    batch: FoldingBatch,
) -> None:  # fmt: skip
    """Scatter the cursors to slots, and run `verify` there."""
    rows, gates, state, ring, batch = _as_packed(rows, gates, state, ring, batch)
    ring, batch, is_live = _keyed_by_slot(ring, batch)
    # Rows of padding become zeros; rows to keep are kept by writing elsewhere.
    keeps = batch.keeps_padding and not bool(is_live.all())
    out = rows.out
    if keeps:
        rows = rows._replace(out=torch.empty_like(out))
    cpu.verify(rows, gates, state, ring, batch)
    if keeps:
        is_mine = is_live.repeat_interleave(batch.max_rows).view(-1, 1, 1)
        out.copy_(torch.where(is_mine, rows.out, out))


def _keyed_by_slot(ring: RingView, batch: FoldingBatch) -> tuple[RingView, FoldingBatch, Tensor]:
    """Return the ring and the batch as `verify` takes them, and which requests have a slot."""
    history_len, ring_start, slots = ring.history_len, ring.ring_start, batch.slots
    num_requests, num_slots = history_len.shape[0], ring.k.shape[0]
    if slots is None:
        slots = torch.arange(num_requests, dtype=torch.int32, device=history_len.device)
    if ring_start is None:
        ring_start = torch.zeros_like(history_len)
    slots, _ = batch._replace(slots=slots).by_request()
    is_live = slots >= 0
    by_slot = history_len.new_zeros((2, num_slots + 1))  # the last one is for padding
    by_slot[:, torch.where(is_live, slots, num_slots)] = torch.stack((ring_start, history_len))
    starts, lengths = by_slot[:, :num_slots].unbind()
    is_fold = None
    if batch.fold_threshold is not None:
        is_fold = (is_live & (history_len >= batch.fold_threshold)).to(torch.int8)
    bounds = torch.arange(num_requests + 1, dtype=torch.int32, device=slots.device)
    return (
        ring._replace(ring_start=starts, history_len=lengths),
        batch._replace(
            cu_seqlens=batch.max_rows * bounds, slots=slots, is_fold=is_fold, padding=-1
        ),
        is_live,
    )


_verify_rows = register(
    "gated_delta_rule.verify_rows",
    {
        "cuda": _backend("cuda"),
        "triton": _backend("triton"),
        "reference": Backend(always, _run_on_cpu),
    },
    check_verify_rows,
)
