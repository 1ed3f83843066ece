"""How the CUDA C++ kernel of the raw ring is launched; as `launch_cuda.py` for the other ring."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.launch_cuda import (
    NEVER,
    Pointed,
    choose_config,
    declare,
    defines_of,
    explain_device,
    explain_operands,
    launcher,
    readable,
)
from hybridspec.ops.ring.view import RawRingView

__all__ = ["Params", "explain", "explain_call", "prepare"]

SOURCE = "gated_delta_rule/verify_raw.cu"
_MAX_TOKENS = 8
_MAX_ROWS = 16  # of window and step
_STAGED_BYTES = 32  # of shared memory for each value row, beside the row
_POINTERS = (
    "q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "ring_k", "ring_v", "ring_a", "ring_b",
    "out", "ring_start", "history_len", "cu_seqlens", "slots", "is_fold",
)  # fmt: skip
_STRIDES = (
    "q_stride_n", "q_stride_h", "k_stride_n", "k_stride_h", "v_stride_n", "v_stride_h",
    "a_stride_n", "b_stride_n", "out_stride_n", "out_stride_h", "state_stride_s",
    "state_stride_h", "ring_k_stride_s", "ring_k_stride_h", "ring_k_stride_r", "ring_v_stride_s",
    "ring_v_stride_h", "ring_v_stride_r", "ring_a_stride_s", "ring_a_stride_h", "ring_b_stride_s",
    "ring_b_stride_h",
)  # fmt: skip
_INTEGERS = (
    "num_requests", "num_rows", "rows_per_request", "ring_capacity", "fold_threshold",
    "cursors_by_row", "zero_padding", "use_l2norm",
)  # fmt: skip
Params, Constants = declare(_POINTERS, _STRIDES + _INTEGERS)  # Params: see raw_system.cuh


def explain(
    rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch
) -> str | None:
    """Return why the CUDA kernel does not support a call, or None."""
    return explain_device(rows.q) or explain_call(rows, gates, state, ring, batch)


def explain_call(
    rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch
) -> str | None:
    """Return which size, dtype or alignment of a call the kernel does not take, or None."""
    wide = (torch.float32,) if rows.q.dtype == torch.bfloat16 else ()
    rings = {"ring.k": ring.k, "ring.v": ring.v}
    if reason := explain_operands(rows, state.values, rings, wide):
        return reason
    if ring.a.dtype != torch.float32:
        return "ring.a is not fp32"
    if batch.max_rows > _MAX_TOKENS or ring.max_window + batch.max_rows > _MAX_ROWS:
        return (
            f"a step has up to {batch.max_rows} rows behind {ring.max_window}, it takes up to "
            f"{_MAX_TOKENS}, and {_MAX_ROWS} together"
        )
    return None


def prepare(
    rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch
) -> Callable[[Rows, Gates, State, RawRingView, FoldingBatch], None]:
    """Build the kernel and all but the addresses; return what launches calls of this kind."""
    num_requests, checkpoints = batch.num_requests(ring), state.values
    if num_requests == 0:
        return lambda rows, *others: rows.out.zero_()
    num_heads, (value_dim, key_dim) = num_requests * checkpoints.shape[1], checkpoints.shape[2:]
    config = choose_config(num_heads, value_dim, checkpoints.dtype)
    warp_bytes = value_dim // config.splits * (key_dim * checkpoints.itemsize + _STAGED_BYTES)
    defines = defines_of(rows, gates, checkpoints, config, warp_bytes)
    constants = _constants(rows, gates, checkpoints, ring, batch)
    return launcher(SOURCE, "verify_raw", defines, num_heads, rows.q, Params, constants, _pointed)


def _pointed(
    rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch
) -> Pointed:
    """Tensors in the order of `_POINTERS`."""
    return (
        *rows[:5], readable(gates.A_log), readable(gates.dt_bias), state.values, *ring[:4],
        rows.out, *ring[4:6], *batch[:3],
    )  # fmt: skip


def _constants(
    rows: Rows, gates: Gates, checkpoints: Tensor, ring: RawRingView, batch: FoldingBatch
) -> ctypes.Structure:
    """Everything of `Params` that is no address."""
    q, k, v, a, b, out = rows
    num_requests = batch.num_requests(ring)
    return Constants(
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], a.stride(0), b.stride(0),
        *out.stride()[:2], *(stride * checkpoints.itemsize for stride in checkpoints.stride()[:2]),
        *ring.k.stride()[:3], *ring.v.stride()[:3], *ring.a.stride()[:2], *ring.b.stride()[:2],
        num_requests, q.shape[0], q.shape[0] // num_requests, ring.k.shape[2],
        NEVER if batch.fold_threshold is None else batch.fold_threshold,
        batch.cu_seqlens is None, not batch.keeps_padding, gates.use_qk_l2norm,
        gates.output_scale(k.shape[2]), gates.beta_scale,
    )  # fmt: skip
