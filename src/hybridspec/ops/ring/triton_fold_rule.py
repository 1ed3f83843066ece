"""The decision to fold, as the kernels that make it share it."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.ring import fold_rule

__all__ = ["is_fold_due"]

STEP = tl.constexpr(fold_rule.STEP)
PERIOD = tl.constexpr(fold_rule.PERIOD)


@triton.jit
def is_fold_due(slot, ring_start, history_len, num_rows, max_window):
    """Whether requests fold; a ring_start of -1 says that only full windows are folded."""
    is_full = history_len + num_rows > max_window
    first_length = max_window - slot * STEP % PERIOD * max_window // PERIOD
    is_first = (ring_start == 0) & (history_len >= first_length)
    return (num_rows > 0) & (is_full | is_first)
