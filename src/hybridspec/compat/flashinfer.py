"""FlashInfer's gated delta rule verification over a ring of u and k, for CPU and CUDA tensors.

Follows flashinfer-ai/flashinfer, flashinfer/gdn_kernels (release 0.7.4): names, argument order,
defaults, shapes and meaning. No code was taken. Differences: one to eight rows per request instead
of four or eight, any head sizes and dtypes that the op takes, and A_log stays fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.errors import UnsupportedError
from hybridspec.ops.gated_delta_rule import verify_rows
from hybridspec.ops.gated_delta_rule.restart import restart_windows

__all__ = [
    "CallerError",
    "gated_delta_rule_mtp_ucache",
    "gated_delta_rule_mtp_ucache_flush",
]

_WINDOW = 16
_FLUSH_RING = 32
_MAX_ROWS = 8


class CallerError(ValueError, AssertionError):
    """A call that breaks the contract; FlashInfer's guards are assertions."""


def gated_delta_rule_mtp_ucache_flush(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    b: Tensor | None = None,
    initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    accepted_steps: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    output: Tensor | None = None,
    disable_output: bool = False,
    recovery_steps: int = 0,
    k_cache: Tensor | None = None,
    u_cache: Tensor | None = None,
    g_cache: Tensor | None = None,
    hist_len: Tensor | None = None,
    cache_base: Tensor | None = None,
    flush_min: int | None = None,
    restart_hist_on_flush: bool = True,
    pdl_trigger: bool = False,
) -> Tensor:
    """Verify T rows per request, append them to the ring, and flush windows that are long enough.

    The state after the window takes part in the outputs; where hist_len >= flush_min it is also
    stored. See `hybridspec.ops.gated_delta_rule.verify` for the equation.

    Args:
        A_log: [HV], fp32; in.
        a: decay inputs, [B, T, HV]; in.
        dt_bias: [HV]; in.
        softplus_beta: only 1.
        softplus_threshold: only 20.
        q: queries, [B, T, H, K]; in.
        k: keys, [B, T, H, K]; in.
        v: values, [B, T, HV, V]; in.
        b: write strength inputs, [B, T, HV]; in.
        initial_state_source: state pool, [pool, HV, V, K]; in-out.
        initial_state_indices: slot of each request, negative = padding, [B]; None: 0..B-1; in.
        output_state_indices: only None.
        intermediate_states_buffer: only None.
        accepted_steps: only None.
        ssm_state_indices: only None.
        disable_state_update: only False.
        use_qk_l2norm_in_kernel: whether q and k are first scaled to length one per head.
        scale: factor of the outputs; None is K^-0.5.
        output: where to write, [B, T, HV, V]; rows of padding stay as they are; out.
        disable_output: only False.
        recovery_steps: only 0.
        k_cache: ring of keys, [pool, H, 32, K]; in-out.
        u_cache: ring of corrected values, [pool, HV, 32, V]; in-out.
        g_cache: ring of cumulative log-decays, [pool, HV, 32], fp32; in-out.
        hist_len: live rows of each request, [B], int32, 0..16; None is 0; in-out.
        cache_base: first live ring row of each request, [B], int32; None is 0; in-out.
        flush_min: shortest window that is flushed; None is 17 - T.
        restart_hist_on_flush: whether cursors of flushed requests move here: cache_base +=
            hist_len (mod 32), hist_len = 0. Otherwise the caller moves them, and nothing is
            checked on the host.
        pdl_trigger: only False.

    Returns:
        [B, T, HV, V], `output` if given.

    Raises:
        CallerError: if cursors break the contract; a ValueError and an AssertionError.
        NotImplementedError: for an argument that is not supported, by name.
        ValueError: for a wrong shape.
    """
    _only_defaults(
        softplus_beta=(softplus_beta, 1.0),
        softplus_threshold=(softplus_threshold, 20.0),
        output_state_indices=(output_state_indices, None),
        intermediate_states_buffer=(intermediate_states_buffer, None),
        accepted_steps=(accepted_steps, None),
        ssm_state_indices=(ssm_state_indices, None),
        disable_state_update=(disable_state_update, False),
        disable_output=(disable_output, False),
        recovery_steps=(recovery_steps, 0),
        pdl_trigger=(pdl_trigger, False),
    )
    _require(
        q=q, k=k, v=v, b=b, initial_state_source=initial_state_source, k_cache=k_cache,
        u_cache=u_cache, g_cache=g_cache,
    )  # fmt: skip
    num_rows = q.shape[1]
    _check_rows(num_rows, k_cache, _FLUSH_RING)
    if restart_hist_on_flush:
        if cache_base is None or hist_len is None:
            raise CallerError(
                "cache_base: restart_hist_on_flush=True needs a caller-owned cache_base and "
                "hist_len, which it moves in place"
            )
        _check_cursors(hist_len, cache_base)
    threshold = _WINDOW + 1 - num_rows if flush_min is None else flush_min
    out = _verify(
        A_log, a, dt_bias, q, k, v, b, initial_state_source, initial_state_indices,
        use_qk_l2norm_in_kernel, scale, output, k_cache, u_cache, g_cache, hist_len, cache_base,
        threshold,
    )  # fmt: skip
    if restart_hist_on_flush:
        restart_windows(
            cache_base, hist_len,
            None if initial_state_indices is None else initial_state_indices.to(torch.int32),
            fold_threshold=threshold, ring_capacity=_FLUSH_RING,
        )  # fmt: skip
    return out


def gated_delta_rule_mtp_ucache(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    b: Tensor | None = None,
    initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    accepted_steps: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    output: Tensor | None = None,
    disable_output: bool = False,
    recovery_steps: int = 0,
    k_cache: Tensor | None = None,
    u_cache: Tensor | None = None,
    g_cache: Tensor | None = None,
    hist_len: Tensor | None = None,
    use_pdl: bool = False,
) -> Tensor:
    """Verify T rows per request and append them to flat rings; the state pool is never written.

    Row j of a window is row j of its ring; the caller keeps hist_len + T <= 16.

    Args:
        A_log: [HV], fp32; in.
        a: decay inputs, [B, T, HV]; in.
        dt_bias: [HV]; in.
        softplus_beta: only 1.
        softplus_threshold: only 20.
        q: queries, [B, T, H, K]; in.
        k: keys, [B, T, H, K]; in.
        v: values, [B, T, HV, V]; in.
        b: write strength inputs, [B, T, HV]; in.
        initial_state_source: state pool, [pool, HV, V, K]; in.
        initial_state_indices: slot of each request, negative = padding, [B]; None: 0..B-1; in.
        output_state_indices: only None.
        intermediate_states_buffer: only None.
        accepted_steps: only None.
        ssm_state_indices: only None.
        disable_state_update: either; the pool is never written.
        use_qk_l2norm_in_kernel: whether q and k are first scaled to length one per head.
        scale: factor of the outputs; None is K^-0.5.
        output: where to write, [B, T, HV, V]; rows of padding stay as they are; out.
        disable_output: only False.
        recovery_steps: only 0.
        k_cache: ring of keys, [pool, H, 16, K]; in-out.
        u_cache: ring of corrected values, [pool, HV, 16, V]; in-out.
        g_cache: ring of cumulative log-decays, [pool, HV, 16], fp32; in-out.
        hist_len: live rows of each request, [B], int32; None is 0; in.
        use_pdl: only False.

    Returns:
        [B, T, HV, V], `output` if given.

    Raises:
        NotImplementedError: for an argument that is not supported, by name.
        ValueError: for a wrong shape.
    """
    _only_defaults(
        softplus_beta=(softplus_beta, 1.0),
        softplus_threshold=(softplus_threshold, 20.0),
        output_state_indices=(output_state_indices, None),
        intermediate_states_buffer=(intermediate_states_buffer, None),
        accepted_steps=(accepted_steps, None),
        ssm_state_indices=(ssm_state_indices, None),
        disable_output=(disable_output, False),
        recovery_steps=(recovery_steps, 0),
        use_pdl=(use_pdl, False),
    )
    _require(
        q=q, k=k, v=v, b=b, initial_state_source=initial_state_source, k_cache=k_cache,
        u_cache=u_cache, g_cache=g_cache,
    )  # fmt: skip
    _check_rows(q.shape[1], k_cache, _WINDOW)
    return _verify(
        A_log, a, dt_bias, q, k, v, b, initial_state_source, initial_state_indices,
        use_qk_l2norm_in_kernel, scale, output, k_cache, u_cache, g_cache, hist_len, None, None,
    )  # fmt: skip


def _only_defaults(**arguments: tuple[object, object]) -> None:
    for name, (value, default) in arguments.items():
        if value is not default and value != default:
            raise UnsupportedError(f"{name}: only {default!r} is supported, got {value!r}")


def _require(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            raise ValueError(f"{name}: expected a tensor, got None")


def _check_rows(num_rows: int, k_cache: Tensor, capacity: int) -> None:
    if not 1 <= num_rows <= _MAX_ROWS:
        raise ValueError(f"q: expected 1..{_MAX_ROWS} rows per request, got {num_rows}")
    if k_cache.shape[2] != capacity:
        raise ValueError(f"k_cache: expected {capacity} ring rows, got {k_cache.shape[2]}")


def _check_cursors(hist_len: Tensor, cache_base: Tensor) -> None:
    for name, cursor in (("hist_len", hist_len), ("cache_base", cache_base)):
        if not cursor.is_contiguous():
            raise CallerError(f"{name}: expected a contiguous tensor, it is moved in place")
    if hist_len.numel() == 0 or (hist_len.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    for name, cursor, end in (
        ("hist_len", hist_len, _WINDOW + 1),
        ("cache_base", cache_base, _FLUSH_RING),
    ):
        least, most = (int(bound) for bound in torch.aminmax(cursor))
        if least < 0 or most >= end:
            raise CallerError(f"{name} out of legal range 0..{end - 1}: found {least}..{most}")


def _verify(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    state: Tensor,
    indices: Tensor | None,
    use_qk_l2norm: bool,
    scale: float | None,
    output: Tensor | None,
    k_cache: Tensor,
    u_cache: Tensor,
    g_cache: Tensor,
    hist_len: Tensor | None,
    cache_base: Tensor | None,
    fold_threshold: int | None,
) -> Tensor:
    """Verify, whatever the ring; `fold_threshold` None never folds."""
    if hist_len is None:
        hist_len = torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
    return verify_rows(
        q, k, v, a, b, A_log, dt_bias, state, k_cache, u_cache, g_cache, hist_len,
        ring_start=cache_base,
        slots=indices if indices is None else indices.to(torch.int32),
        max_window=min(_WINDOW, k_cache.shape[2] - q.shape[1]),
        fold_threshold=fold_threshold,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        out=output,
    )  # fmt: skip
