"""FlashInfer's draft verification over raw rings, for CPU and CUDA tensors.

The sibling of `gated_delta_rule_mtp_ucache_flush` whose ring holds k before its norm, v, and the
logits a and b: names, order, defaults, shapes and meaning of the kernel that FlashInfer calls
"vcache". No code was taken. What differs: T is 1 to 8; head sizes, dtypes (fp32 states too) and
strides are those of the op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.compat._calls import CallerError, renamed
from hybridspec.compat._flashinfer import (
    MAX_TOKENS,
    NAMES,
    RING_SLOTS,
    W_RING,
    as_int32,
    check_range,
    cursors_to_move,
    required,
    with_last_stride_one,
)
from hybridspec.errors import UnsupportedError
from hybridspec.ops.gated_delta_rule import verify_raw_rows
from hybridspec.ops.ring import RawRingView, restart_windows

__all__ = ["gated_delta_rule_mtp_vcache_flush"]


def gated_delta_rule_mtp_vcache_flush(
    A_log: Tensor, a: Tensor, dt_bias: Tensor, softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0, q: Tensor | None = None, k: Tensor | None = None,
    v: Tensor | None = None, b: Tensor | None = None, initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None, k_cache: Tensor | None = None,
    v_cache: Tensor | None = None, a_cache: Tensor | None = None, b_cache: Tensor | None = None,
    hist_len: Tensor | None = None, cache_base: Tensor | None = None, flush_min: int | None = None,
    restart_hist_on_flush: bool = True, use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None, output: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Verify T rows per request, append them as they are, and flush the longer windows.

    The window of request b is the ring rows (cache_base[b] + j) mod 32, j < hist_len[b], of its
    slot; its T rows go behind the window. Where hist_len[b] >= flush_min the window is also added
    to the state in the pool. The equations: `hybridspec.ops.gated_delta_rule.verify_raw`.

    Every call needs hist_len[b] + T <= 16, flushing or not, so windows are flushed one step early.
    A caller that may commit all T rows of a step keeps to that with flush_min <= 17 - 2T alone,
    which is 9 at T = 4.

    Arguments, result and errors as in `hybridspec.compat.flashinfer`'s
    `gated_delta_rule_mtp_ucache_flush`, but for:

    Args:
        initial_state_source: states, [pool, HV, V, K], bf16, fp16 or fp32; in-out.
        k_cache: keys before their norm, [pool, H, 32, K]; in-out.
        v_cache: values, [pool, HV, 32, V]; in-out.
        a_cache: decay inputs, [pool, HV, 32], fp32; in-out.
        b_cache: write strength inputs, [pool, HV, 32], fp32; in-out.
        hist_len: rows of each window, [B], int32, 0..16-T; in-out.
        flush_min: shortest window that is flushed, 1..17-T, of which 17-T is never; None is 16 - T.
        output: where to write, [B, T, HV, V], may be a view; rows of padding keep what they hold;
            out.

    Numerics:
        As `hybridspec.ops.gated_delta_rule.verify_raw`.

    Source:
        flashinfer-ai/flashinfer, proposed file
        flashinfer/gdn_kernels/gdn_decode_bf16_wy_vcache_flush.py, for the signature.
    """
    _check_softplus(softplus_beta, softplus_threshold)
    num_tokens = _num_tokens(q, k_cache)
    hist_len, most = required("hist_len", hist_len), W_RING - num_tokens
    text = f"[0, {most}] for T={num_tokens}"
    indices = as_int32(initial_state_indices)
    if restart_hist_on_flush:
        cache_base = cursors_to_move(hist_len, cache_base, most, text)
    elif not hist_len.is_cuda:
        check_range("hist_len", hist_len if indices is None else hist_len[indices >= 0], most, text)
    threshold = _threshold(flush_min, num_tokens)
    q, k, v, a, b = (
        with_last_stride_one(required(name, rows))
        for name, rows in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b))
    )
    ring = RawRingView(
        required("k_cache", k_cache),
        required("v_cache", v_cache),
        required("a_cache", a_cache),
        required("b_cache", b_cache),
        torch.zeros_like(hist_len) if cache_base is None else cache_base.contiguous(),
        hist_len.contiguous(),
        most,
    )
    with torch.no_grad(), renamed(NAMES):
        out = verify_raw_rows(
            q, k, v, a, b, A_log, dt_bias, required("initial_state_source", initial_state_source),
            ring, slots=indices, fold_threshold=threshold, scale=scale,
            use_qk_l2norm=bool(use_qk_l2norm_in_kernel), out=output,
        )  # fmt: skip
    if restart_hist_on_flush and cache_base is not None:
        restart_windows(
            cache_base, hist_len, indices, fold_threshold=threshold, ring_capacity=RING_SLOTS
        )
    return out


def _check_softplus(softplus_beta: float, softplus_threshold: float) -> None:
    for name, value, default in (
        ("softplus_beta", softplus_beta, 1.0),
        ("softplus_threshold", softplus_threshold, 20.0),
    ):
        if value != default:
            raise UnsupportedError(f"{name}: only {default!r} is supported, got {value!r}")


def _threshold(flush_min: int | None, num_tokens: int) -> int:
    most = W_RING - num_tokens
    threshold = most if flush_min is None else flush_min
    if not isinstance(threshold, int) or not 1 <= threshold <= most + 1:
        raise CallerError(
            f"flush_min: {flush_min!r} is out of range [1, {most + 1}] for T={num_tokens}, "
            f"of which {most + 1} never flushes"
        )
    return threshold


def _num_tokens(q: Tensor | None, k_cache: Tensor | None) -> int:
    """Return T, or raise unless it and the number of ring rows are what is served."""
    q, k_cache = required("q", q), required("k_cache", k_cache)
    for name, tensor in (("q", q), ("k_cache", k_cache)):
        if tensor.dim() != 4:
            raise CallerError(f"{name}: expected 4 dimensions, got shape {list(tensor.shape)}")
    if k_cache.shape[2] != RING_SLOTS:
        raise CallerError(f"k_cache: expected {RING_SLOTS} ring rows, got {k_cache.shape[2]}")
    if not 1 <= q.shape[1] <= MAX_TOKENS:
        raise UnsupportedError(f"q: T of 1 to {MAX_TOKENS} is supported, got T={q.shape[1]}")
    return q.shape[1]
