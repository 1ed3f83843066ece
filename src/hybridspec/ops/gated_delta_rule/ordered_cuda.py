"""How the CUDA C++ kernel is launched whose bits do not depend on how rows are cut into steps.

Dtypes, sizes and strides decide what it supports, neither batch nor drafts: an engine that used
it for some steps and the Triton kernel for others would not be exact, since their bits differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.launch_cuda import (
    Params,
    choose_config,
    constants_of,
    defines_of,
    explain_device,
    explain_tensors,
    launcher,
    pointed_of,
)
from hybridspec.ops.gated_delta_rule.launch_ordered import explain_batch
from hybridspec.ops.ring.view import RingView

__all__ = ["explain", "explain_call", "prepare"]

SOURCE = "gated_delta_rule/verify_ordered.cu"
_FEWEST_TOKENS, _MOST_TOKENS = 4, 8  # of a request, that it is built for
_WINDOWS = (16, 24)
_STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def explain(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> str | None:
    """Return why the kernel does not support a call, or None."""
    return explain_device(rows.q) or explain_call(rows, gates, state, ring, batch)


def explain_call(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> str | None:
    """Return which size, dtype, alignment or kind of batch is not supported, or None."""
    if state.values.dtype not in _STATE_DTYPES:
        return "states have 8 bits"
    call = _with_a_row(rows), gates, state, ring, batch
    return explain_tensors(*call, _WINDOWS[-1]) or explain_batch(ring, batch)


def prepare(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> Callable[[Rows, Gates, State, RingView, FoldingBatch], None]:
    """Build the kernel and all but the addresses; return what launches calls of this kind."""
    num_requests, checkpoints = batch.num_requests(ring), state.values
    if num_requests == 0:
        return lambda rows, *others: rows.out.zero_()
    if rows.q.shape[0] == 0:  # folds alone
        run = prepare(_with_a_row(rows), gates, state, ring, batch)
        return lambda rows, *others: run(_with_a_row(rows), *others)
    num_heads, (value_dim, key_dim) = num_requests * checkpoints.shape[1], checkpoints.shape[2:]
    config = replace(choose_config(num_heads, value_dim, checkpoints.dtype), evict_first=True)
    tokens = _FEWEST_TOKENS if batch.max_rows <= _FEWEST_TOKENS else _MOST_TOKENS
    window = next(most for most in _WINDOWS if ring.max_window <= most)
    if tokens == _MOST_TOKENS and checkpoints.itemsize == 2:  # two more would spill
        config = replace(config, blocks=8 // config.warps)
    # Of shared memory: state rows, live rows of u and one of v; coefficients of rows of X.
    row_bytes = key_dim * checkpoints.itemsize + 2 * (window + 8)
    table_bytes = 8 * tokens * (window + _MOST_TOKENS)
    warp_bytes = value_dim // config.splits * row_bytes + table_bytes
    defines = defines_of(rows, gates, checkpoints, config, warp_bytes) | {
        "MOST_TOKENS": tokens,
        "MOST_WINDOW": window,
        "BY_BLOCK": 0,
        "TOKEN_DECAY": 0,
    }
    constants = constants_of(rows, gates, state, ring, batch)
    return launcher(
        SOURCE, "verify_ordered", defines, num_heads, rows.q, Params, constants, pointed_of,
        fuses=False,
    )  # fmt: skip


def _with_a_row(rows: Rows) -> Rows:
    """Return rows as they are, or one of nobody: the kernel reads the first."""
    if rows.q.shape[0]:
        return rows
    return Rows(*[part.new_zeros(1, *part.shape[1:]) for part in rows])
