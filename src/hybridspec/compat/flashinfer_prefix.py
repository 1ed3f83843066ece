"""FlashInfer's states for prefix caches, for CPU and CUDA tensors.

Follows flashinfer-ai/flashinfer, pull request 5073, file
flashinfer/gdn_kernels/gdn_prefix_materialize.py: names, order, defaults, shapes and meaning. No
code was taken. What differs: head sizes, dtypes and strides are those of the op; in rings of 16
rows a window has at most 15; no list of active requests means that the kernel looks at all, so
nothing waits for the device.
"""

from __future__ import annotations

from torch import Tensor

from hybridspec.compat._calls import CallerError, renamed
from hybridspec.ops.gated_delta_rule.prefix import materialize_rows

__all__ = ["gdn_prefix_materialize"]

_WINDOW = 16
_NAMES = {
    "ring.k": "k_cache",
    "ring.u": "u_cache",
    "ring.cum_log_decay": "g_cache",
    "slots": "src_slots",
    "out_slots": "dst_slots",
    "ring_start": "cache_base",
    "ring.ring_start": "cache_base",
    "num_rows": "count",
    "active": "active_request_indices",
    "programs": "min_blocks_per_mp",
}


def gdn_prefix_materialize(
    state: Tensor, src_slots: Tensor, dst_slots: Tensor, k_cache: Tensor, u_cache: Tensor,
    g_cache: Tensor, cache_base: Tensor, count: Tensor,
    active_request_indices: Tensor | None = None, num_active: Tensor | None = None, *,
    min_blocks_per_mp: int = 8,
) -> Tensor:  # fmt: skip
    """Write states at a token of the recent past into other slots; sources and rings stay.

    The equation: `hybridspec.ops.gated_delta_rule.materialize`, for the first count[b] ring rows
    from cache_base[b] on.

    Args:
        state: states, [pool, HV, V, K]; in-out.
        src_slots: slot to read of each request, negative = skipped, [B], int32; in.
        dst_slots: slot to write, negative = skipped, [B], int32; none that another request reads
            or writes; in.
        k_cache: normalised keys, [pool, H, R, K]; in.
        u_cache: corrected values, [pool, HV, R, V]; in.
        g_cache: log-decay since the state in the pool, [pool, HV, R], fp32; in.
        cache_base: first row of each window, [B], int32; in.
        count: rows to take in, [B], int32; 0 copies every bit, negative or more than 16 = skipped;
            in.
        active_request_indices: rows of the batch to look at, negative ones are skipped, [B], int32;
            None: all; in.
        num_active: how many of these are looked at, [1], int32; None: all; in.
        min_blocks_per_mp: programs on a multiprocessor.

    Returns:
        `state`.

    Raises:
        CallerError: for a wrong call; it is a ValueError.

    Numerics:
        As `hybridspec.ops.gated_delta_rule.materialize`.

    Source:
        The repository that the module names.
    """
    if not isinstance(k_cache, Tensor) or k_cache.dim() != 4:
        raise CallerError("k_cache: expected a tensor [pool, H, R, K]")
    with renamed(_NAMES):
        materialize_rows(
            state, k_cache, u_cache, g_cache, src_slots, dst_slots, cache_base, count,
            active=active_request_indices, num_active=num_active,
            max_window=min(_WINDOW, k_cache.shape[2] - 1), programs=min_blocks_per_mp,
        )  # fmt: skip
    return state
