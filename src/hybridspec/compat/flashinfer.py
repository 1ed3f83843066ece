"""FlashInfer's gated delta rule for draft verification, for CPU and CUDA tensors.

Follows flashinfer-ai/flashinfer at commit 055568ad032f17317d17daea7989e8155baf8fba, folder
flashinfer/gdn_kernels, files gdn_decode_bf16_wy_ucache_flush.py and gdn_decode_bf16_wy_ucache.py:
names, order, defaults, shapes and meaning. No code was taken. What differs: T is 1 to 8 instead of
4 or 8; head sizes, dtypes and strides are those of the op; A_log and dt_bias are not rounded to the
dtype of the rows; a row with a negative index never moves its cursors. Rows in fp16 are served by
the verify-only function too, where FlashInfer's is "bf16-only" and says so in its error.

vLLM's open adapter for these kernels loads this file by its path and reads `W_RING` and
`RING_SLOTS` from it.
"""

from __future__ import annotations

from typing import Any

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
    seed_of_rounding,
    with_last_stride_one,
)
from hybridspec.compat.flashinfer_prefix import gdn_prefix_materialize
from hybridspec.compat.flashinfer_raw import gated_delta_rule_mtp_vcache_flush
from hybridspec.errors import UnsupportedError
from hybridspec.ops.gated_delta_rule import verify_rows
from hybridspec.ops.ring import restart_windows

__all__ = [
    "RING_SLOTS",
    "W_RING",
    "CallerError",
    "gated_delta_rule_mtp_ucache",
    "gated_delta_rule_mtp_ucache_flush",
    "gated_delta_rule_mtp_vcache_flush",
    "gdn_prefix_materialize",
]

_FLAT_RING = 16

# Of arguments that both functions have.
_ONLY_DEFAULTS = {
    "softplus_beta": 1.0,
    "softplus_threshold": 20.0,
    "output_state_indices": None,
    "intermediate_states_buffer": None,
    "accepted_steps": None,
    "ssm_state_indices": None,
    "disable_output": False,
    "recovery_steps": 0,
}


def gated_delta_rule_mtp_ucache_flush(
    A_log: Tensor, a: Tensor, dt_bias: Tensor, softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0, q: Tensor | None = None, k: Tensor | None = None,
    v: Tensor | None = None, b: Tensor | None = None, initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None, output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None, accepted_steps: Tensor | None = None,
    ssm_state_indices: Tensor | None = None, disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True, scale: float | None = None, output: Tensor | None = None,
    disable_output: bool = False, recovery_steps: int = 0, k_cache: Tensor | None = None,
    u_cache: Tensor | None = None, g_cache: Tensor | None = None, hist_len: Tensor | None = None,
    cache_base: Tensor | None = None, flush_min: int | None = None,
    restart_hist_on_flush: bool = True, pdl_trigger: bool = False,
    stochastic_rounding: bool = False, rand_seed: Tensor | int | None = None,
) -> Tensor:  # fmt: skip
    """Verify T rows per request, append them to the rings, and flush the longer windows.

    The window of request b is the ring rows (cache_base[b] + j) mod 32, j < hist_len[b], of its
    slot; its T rows go behind the window. Where hist_len[b] >= flush_min the window is also added
    to the state in the pool (the equation: `hybridspec.ops.gated_delta_rule.fold`), and the rows
    appended count their decay from there. Outputs: `hybridspec.ops.gated_delta_rule.verify`.

    Args:
        A_log: [HV], any float dtype; in.
        a: decay inputs, [B, T, HV]; in.
        dt_bias: [HV], any float dtype; in.
        softplus_beta: only 1.
        softplus_threshold: only 20; above it x and log(1 + e^x) are the same in fp32.
        q: queries, [B, T, H, K], T = 1..8; in.
        k: keys, [B, T, H, K]; in.
        v: values, [B, T, HV, V]; in.
        b: write strength inputs, [B, T, HV]; in.
        initial_state_source: states, [pool, HV, V, K]; in-out.
        initial_state_indices: slot of each request, negative = padding, [B], int32 or int64; None:
            0..B-1; in.
        output_state_indices: only None.
        intermediate_states_buffer: only None.
        accepted_steps: only None.
        ssm_state_indices: only None.
        disable_state_update: only False; `gated_delta_rule_mtp_ucache` leaves the states alone.
        use_qk_l2norm_in_kernel: whether q and k are first scaled to length one per head.
        scale: factor of the outputs; None is K^-0.5.
        output: where to write, [B, T, HV, V]; rows of padding keep what they hold; out.
        disable_output: only False.
        recovery_steps: only 0.
        k_cache: normalised keys, [pool, H, 32, K]; in-out.
        u_cache: corrected values, [pool, HV, 32, V]; in-out.
        g_cache: log-decay since the state in the pool, [pool, HV, 32], fp32; in-out.
        hist_len: rows of each window, [B], int32, 0..16; in-out.
        cache_base: first row of each window, [B], int32, 0..31; None: zeros; in-out.
        flush_min: shortest window that is flushed, 1..17-T; None is 17 - T.
        restart_hist_on_flush: whether flushed windows end here: cache_base += hist_len mod 32, then
            hist_len = 0; the caller adds what is accepted. Ranges are then checked, on a GPU by
            waiting for it (not while a graph is captured). If False, the cursors stay and the
            caller moves them once per step, after all layers; there is no host sync.
        pdl_trigger: only False.
        stochastic_rounding: whether states of 16 bits are rounded by chance when they are flushed.
        rand_seed: what chance follows from, besides slot, head, element and `cache_base`: a number
            or a tensor of one int64, which a captured graph reads anew. Another one for each step
            makes every flush a draw of its own; the same ones give the same bits.

    Returns:
        `output`, or [B, T, HV, V] in the dtype of `v` with zeros in rows of padding.

    Raises:
        CallerError: for a wrong call; it is a ValueError and an AssertionError.
        UnsupportedError: for an argument that only accepts its default, by name, or another T; it
            is a NotImplementedError.

    Numerics:
        As `hybridspec.ops.gated_delta_rule.verify`.

    Source:
        The repository and commit that the module names.
    """
    _accept_only_defaults(locals(), disable_state_update=False, pdl_trigger=False)
    num_tokens, capacity = _sizes(q, k_cache)
    if capacity != RING_SLOTS:
        raise CallerError(f"k_cache: expected {RING_SLOTS} ring rows, got {capacity}")
    hist_len = required("hist_len", hist_len)
    if restart_hist_on_flush:
        cache_base = cursors_to_move(hist_len, cache_base, W_RING, f"[0, {W_RING}]")
    lazy = W_RING - num_tokens + 1
    threshold = lazy if flush_min is None else flush_min
    if not isinstance(threshold, int) or not 1 <= threshold <= lazy:
        raise CallerError(
            f"flush_min: {flush_min!r} is out of range [1, {lazy}] for T={num_tokens}; a longer "
            "window could neither take the rows nor be flushed"
        )
    indices = as_int32(initial_state_indices)
    out = _verify(
        A_log, a, dt_bias, q, k, v, b, initial_state_source, indices, k_cache, u_cache, g_cache,
        hist_len, cache_base, threshold, bool(use_qk_l2norm_in_kernel), scale, output,
        seed_of_rounding(rand_seed, hist_len.device) if stochastic_rounding else None,
    )  # fmt: skip
    if restart_hist_on_flush and cache_base is not None:
        restart_windows(
            cache_base, hist_len, indices, fold_threshold=threshold, ring_capacity=RING_SLOTS
        )
    return out


def gated_delta_rule_mtp_ucache(
    A_log: Tensor, a: Tensor, dt_bias: Tensor, softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0, q: Tensor | None = None, k: Tensor | None = None,
    v: Tensor | None = None, b: Tensor | None = None, initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None, output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None, accepted_steps: Tensor | None = None,
    ssm_state_indices: Tensor | None = None, disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True, scale: float | None = None, output: Tensor | None = None,
    disable_output: bool = False, recovery_steps: int = 0, k_cache: Tensor | None = None,
    u_cache: Tensor | None = None, g_cache: Tensor | None = None, hist_len: Tensor | None = None,
    use_pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Verify T rows per request and append them to flat rings; the states are never written.

    The window of request b is the ring rows 0..hist_len[b]-1 of its slot, and its T rows go behind
    them; the caller keeps hist_len[b] + T <= 16. Outputs:
    `hybridspec.ops.gated_delta_rule.verify`.

    Arguments, result, errors and numerics as in `gated_delta_rule_mtp_ucache_flush`, but for:

    Args:
        initial_state_source: states, [pool, HV, V, K]; in.
        disable_state_update: either; the states are never written.
        k_cache: normalised keys, [pool, H, 16, K]; in-out.
        u_cache: corrected values, [pool, HV, 16, V]; in-out.
        g_cache: log-decay since the state in the pool, [pool, HV, 16], fp32; in-out.
        hist_len: rows of each window, [B], int32, 0..16-T; checked on a CPU; in.
        use_pdl: only False.
    """
    _accept_only_defaults(locals(), use_pdl=False)
    num_tokens, capacity = _sizes(q, k_cache)
    if capacity != _FLAT_RING:
        raise CallerError(f"k_cache: expected {_FLAT_RING} ring rows, got {capacity}")
    hist_len = required("hist_len", hist_len)
    indices = as_int32(initial_state_indices)
    if not hist_len.is_cuda:
        live = hist_len if indices is None else hist_len[indices >= 0]
        most = _FLAT_RING - num_tokens
        check_range("hist_len", live, most, f"[0, {most}] for T={num_tokens}")
    return _verify(
        A_log, a, dt_bias, q, k, v, b, initial_state_source, indices, k_cache, u_cache, g_cache,
        hist_len, None, None, bool(use_qk_l2norm_in_kernel), scale, output,
    )  # fmt: skip


def _accept_only_defaults(arguments: dict[str, Any], **defaults: object) -> None:
    """Raise for an argument that has another value than what is named here or above."""
    for name, default in (_ONLY_DEFAULTS | defaults).items():
        value = arguments[name]
        if value is not default and (default is None or value != default):
            got = f"a {type(value).__name__}" if default is None else repr(value)
            raise UnsupportedError(f"{name}: only {default!r} is supported, got {got}")


def _sizes(q: Tensor | None, k_cache: Tensor | None) -> tuple[int, int]:
    """Return T and the number of ring rows."""
    q, k_cache = required("q", q), required("k_cache", k_cache)
    for name, tensor in (("q", q), ("k_cache", k_cache)):
        if tensor.dim() != 4:
            raise CallerError(f"{name}: expected 4 dimensions, got shape {list(tensor.shape)}")
    num_tokens = q.shape[1]
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise UnsupportedError(f"q: T of 1 to {MAX_TOKENS} is supported, got T={num_tokens}")
    return num_tokens, k_cache.shape[2]


def _verify(
    A_log: Tensor, a: Tensor, dt_bias: Tensor, q: Tensor | None, k: Tensor | None, v: Tensor | None,
    b: Tensor | None, state: Tensor | None, indices: Tensor | None, k_cache: Tensor | None,
    u_cache: Tensor | None, g_cache: Tensor | None, hist_len: Tensor, cache_base: Tensor | None,
    flush_min: int | None, use_qk_l2norm: bool, scale: float | None, output: Tensor | None,
    rand_seed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Call the op; `flush_min` None leaves the states alone."""
    q, k, v, a, b = (
        with_last_stride_one(required(name, rows))
        for name, rows in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b))
    )
    k_cache = required("k_cache", k_cache)
    with torch.no_grad(), renamed(NAMES):
        return verify_rows(
            q,
            k,
            v,
            a,
            b,
            A_log,
            dt_bias,
            required("initial_state_source", state),
            k_cache,
            required("u_cache", u_cache),
            required("g_cache", g_cache),
            hist_len,
            ring_start=cache_base,
            slots=indices,
            # In a ring of 16 rows the window leaves room for the T rows.
            max_window=min(W_RING, k_cache.shape[2] - q.shape[1]),
            fold_threshold=flush_min,
            scale=scale,
            use_qk_l2norm=use_qk_l2norm,
            out=output,
            rand_seed=rand_seed,
        )
