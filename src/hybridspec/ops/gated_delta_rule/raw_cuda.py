"""How the CUDA C++ kernel of the raw ring is launched; as `launch_cuda.py` for the other ring."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from hybridspec.ops._checks import dtype_name, row_alignment
from hybridspec.ops._nvrtc import explain_compiler, load_kernel
from hybridspec.ops._triton_support import capability
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.launch_cuda import (
    ACTS,
    NEVER,
    TARGETS,
    TYPES,
    choose_config,
    readable,
)
from hybridspec.ops.ring.raw_view import RawRingView

__all__ = ["Params", "explain", "explain_call", "prepare", "verify"]

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
_PACKED = struct.Struct(f"{len(_POINTERS)}P")


class Constants(ctypes.Structure):
    """What `Params` holds besides addresses: the same for all calls of a kind."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in (*_STRIDES, *_INTEGERS)),
        ("scale", ctypes.c_float),
        ("beta_scale", ctypes.c_float),
    ]


class Params(ctypes.Structure):
    """The struct of the same name in raw_system.cuh."""

    _fields_ = [*((name, ctypes.c_void_p) for name in _POINTERS), *Constants._fields_]


def explain(
    rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch
) -> str | None:
    """Say why the CUDA kernel cannot serve a call, or return None."""
    if not rows.q.is_cuda:
        return "the tensors are not on a CUDA device"
    if capability(rows.q) not in TARGETS:
        return "it was measured on sm_90 only"
    return explain_compiler() or explain_call(rows, gates, state, ring, batch)


def explain_call(
    rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch
) -> str | None:
    """Say which size, dtype or alignment of a call the kernel does not take, or return None."""
    q, k, v, a, b, out = rows
    checkpoints, dtype = state.values, rows.q.dtype
    if dtype not in ACTS:
        return f"q has dtype {dtype_name(dtype)}, it takes bfloat16 and float16"
    for name, tensor in (("ring.k", ring.k), ("ring.v", ring.v), ("out", out)):
        if tensor.dtype != dtype:
            return f"{name} has dtype {dtype_name(tensor.dtype)}, q has {dtype_name(dtype)}"
    if checkpoints.dtype not in (dtype, *((torch.float32,) if dtype == torch.bfloat16 else ())):
        return f"state has dtype {dtype_name(checkpoints.dtype)} and q {dtype_name(dtype)}"
    if a.dtype != b.dtype or a.dtype not in (dtype, torch.float32):
        return f"a and b have dtypes {dtype_name(a.dtype)} and {dtype_name(b.dtype)}"
    if ring.a.dtype != torch.float32:
        return "ring.a is not fp32"
    if q.shape[0] == 0:
        return "there are no rows"
    value_dim, key_dim = checkpoints.shape[2:]
    if key_dim != 128 or value_dim % 64 or value_dim > 256:
        return (
            f"heads have K = {key_dim} and V = {value_dim}, it takes K = 128, V = 64, 128, ..., 256"
        )
    needed = ring.max_window + batch.max_rows
    if batch.max_rows > _MAX_TOKENS or needed > _MAX_ROWS:
        return (
            f"a step has up to {batch.max_rows} rows behind {ring.max_window}, it takes up to "
            f"{_MAX_TOKENS}, and {_MAX_ROWS} together"
        )
    for name, tensor in (
        ("q", q), ("k", k), ("v", v), ("state", checkpoints), ("ring.k", ring.k),
        ("ring.v", ring.v), ("out", out),
    ):  # fmt: skip
        if row_alignment(tensor) < 16:
            return f"{name} does not lie on 16-byte boundaries"
        longest = max(tensor.stride()) * tensor.itemsize
        if longest >= 2**32:
            return f"{name} has a stride of {longest} bytes"
    return None


def verify(rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch) -> None:
    """Launch the kernel."""
    prepare(rows, gates, state, ring, batch)(rows, gates, state, ring, batch)


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
    defines = {
        "ACT": ACTS[rows.k.dtype],
        "STATE_BITS": 8 * checkpoints.itemsize,
        "GATE": TYPES[rows.a.dtype],
        "A_LOG": TYPES[readable(gates.A_log).dtype],
        "DT_BIAS": TYPES[readable(gates.dt_bias).dtype],
        "HEADS": rows.k.shape[1],
        "VALUE_HEADS": checkpoints.shape[1],
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "STATE_STRIDE": checkpoints.stride(2) * checkpoints.itemsize,
        "SCALE_GROUP": 32,
        "NEVER": NEVER,
        "SPLITS": config.splits,
        "WARPS": config.warps,
        "SHARED_BYTES": warp_bytes,
        "BLOCKS_PER_MULTIPROCESSOR": config.blocks,
        "EVICT_FIRST": int(config.evict_first),
    }
    num_blocks = -(-num_heads * config.splits // config.warps)
    constants = bytes(_constants(rows, gates, checkpoints, ring, batch))
    constants = constants.ljust(ctypes.sizeof(Params) - _PACKED.size, b"\0")
    with torch.cuda.device_of(rows.q):
        kernel = load_kernel(
            SOURCE, "verify_raw", tuple(defines.items()), 32 * config.warps,
            config.warps * warp_bytes, rows.q.device.index,
        )  # fmt: skip

    def run(rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch) -> None:
        pointed = (
            *rows[:5], readable(gates.A_log), readable(gates.dt_bias), state.values, *ring[:4],
            rows.out, *ring[4:6], *batch[:3],
        )  # fmt: skip
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in pointed]
        params = Params.from_buffer_copy(_PACKED.pack(*addresses) + constants)
        with torch.cuda.device_of(rows.q):
            kernel.launch(num_blocks, params)

    return run


def _constants(
    rows: Rows, gates: Gates, checkpoints: Tensor, ring: RawRingView, batch: FoldingBatch
) -> Constants:
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
