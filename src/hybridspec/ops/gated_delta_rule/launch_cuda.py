"""Launch of the CUDA C++ verify kernel: what it supports, its build, its arguments."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridspec.errors import UnsupportedError
from hybridspec.ops._checks import dtype_name, row_alignment
from hybridspec.ops._nvrtc import explain_compiler, load_kernel
from hybridspec.ops._triton_support import capability, round_up_to_power_of_two
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.int8_state import GROUP_SIZE, SCALE_DTYPE
from hybridspec.ops.ring.view import RingView

__all__ = [
    "ACTS",
    "NEVER",
    "TARGETS",
    "TYPES",
    "CudaConfig",
    "Params",
    "Pointed",
    "choose_config",
    "constants_of",
    "declare",
    "defines_of",
    "explain_device",
    "explain_operands",
    "explain_tensors",
    "explain_verify",
    "launcher",
    "pointed_of",
    "prepare",
    "readable",
]

SOURCE = "gated_delta_rule/verify.cu"
TARGETS = ((9, 0),)  # where it was measured against the portable kernel
NEVER = 2**31 - 1  # as fold_threshold
_MAX_TOKENS = 8
_MAX_WINDOW = 16
_STAGED_BYTES = 48  # of shared memory for each value row, beside the row
ACTS = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
TYPES = ACTS | {torch.float32: "Fp32"}
_POINTERS = (
    "q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "state_scale", "ring_k", "ring_u",
    "ring_decay", "out", "ring_start", "history_len", "cu_seqlens", "slots", "is_fold",
)  # fmt: skip
_STRIDES = (
    "q_stride_n", "q_stride_h", "k_stride_n", "k_stride_h", "v_stride_n", "v_stride_h",
    "a_stride_n", "b_stride_n", "out_stride_n", "out_stride_h", "state_stride_s",
    "state_stride_h", "scale_stride_s", "scale_stride_h", "ring_k_stride_s",
    "ring_k_stride_h", "ring_k_stride_r", "ring_u_stride_s", "ring_u_stride_h",
    "ring_u_stride_r", "decay_stride_s", "decay_stride_h",
)  # fmt: skip
_INTEGERS = (
    "num_requests", "num_rows", "rows_per_request", "ring_capacity",
    "fold_threshold", "cursors_by_row", "zero_padding", "use_l2norm", "padding", "slot_stride",
    "fold_by_slot",
)  # fmt: skip


def declare(
    pointers: tuple[str, ...], integers: tuple[str, ...]
) -> tuple[type[ctypes.Structure], type[ctypes.Structure]]:
    """Return the struct that a kernel takes, and its part besides addresses.

    The part is the same for all calls of a kind; it ends with `scale` and `beta_scale`.
    """
    rest: list[tuple[str, Any]] = [(name, ctypes.c_int32) for name in integers]
    rest += [("scale", ctypes.c_float), ("beta_scale", ctypes.c_float)]
    fields = [*((name, ctypes.c_void_p) for name in pointers), *rest]
    return (
        type("Params", (ctypes.Structure,), {"_fields_": fields}),
        type("Constants", (ctypes.Structure,), {"_fields_": rest}),
    )


Pointed = tuple[Tensor | None, ...]
Params, Constants = declare(_POINTERS, _STRIDES + _INTEGERS)  # Params: see verify_layout.cuh


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaConfig:
    """Shape of a launch.

    Attributes:
        splits: warps that share the value rows of one head.
        warps: warps of a block.
        blocks: blocks that a multiprocessor must hold, which caps registers.
        evict_first: whether states that a step only reads leave the second-level cache early.
    """

    splits: int
    warps: int
    blocks: int
    evict_first: bool


def choose_config(num_heads: int, value_dim: int, state_dtype: torch.dtype) -> CudaConfig:
    """Pick the shape of a launch; tuned on an H200, see docs/kernels/gdn_verify.md.

    Args:
        num_heads: requests times value heads.
        value_dim: V.
        state_dtype: dtype of the checkpoints.
    """
    if state_dtype == torch.int8:  # half the bytes: a warp takes twice the rows
        rows, warps, resident = (128 if value_dim % 128 == 0 and num_heads > 1024 else 64), 1, 8
    elif state_dtype == torch.float32:
        rows, warps, resident = 64, 1, 6
    else:
        rows, warps, resident = 64, (2 if value_dim % 128 == 0 else 1), 10
    return CudaConfig(
        splits=value_dim // rows,
        warps=warps,
        blocks=resident // warps,
        # Beyond this states are several times the cache, and the hint slows folds down.
        evict_first=num_heads <= 8192,
    )


def explain_verify(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> str | None:
    """Return why the CUDA kernel does not support a verify call, or None."""
    return explain_device(rows.q) or explain_tensors(rows, gates, state, ring, batch)


def explain_device(tensor: Tensor) -> str | None:
    """Return why the kernels cannot run on the device of a tensor, or None."""
    if not tensor.is_cuda:
        return "the tensors are not on a CUDA device"
    if capability(tensor) not in TARGETS:
        return "it was measured on sm_90 only"
    return explain_compiler()


def explain_tensors(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch,
    most_window: int = _MAX_WINDOW,
) -> str | None:  # fmt: skip
    """Return which size, dtype or alignment of a call the kernel does not take, or None."""
    if batch.rand_seed is not None:
        return "it rounds folded states to nearest"
    wide = (torch.float32, torch.int8) if rows.q.dtype == torch.bfloat16 else ()
    rings = {"ring.k": ring.k, "ring.u": ring.u}
    if reason := explain_operands(rows, state.values, rings, wide):
        return reason
    if ring.cum_log_decay.dtype != torch.float32 or ring.cum_log_decay.stride(2) != 1:
        return "ring.cum_log_decay is not fp32 with a last stride of 1"
    if batch.max_rows > _MAX_TOKENS:
        return f"max_verify_tokens is {batch.max_rows}, it takes up to {_MAX_TOKENS}"
    if ring.max_window > most_window:
        return f"ring.max_window is {ring.max_window}, it takes up to {most_window}"
    return None


def explain_operands(
    rows: Rows, state: Tensor, rings: dict[str, Tensor], wide: tuple[torch.dtype, ...]
) -> str | None:
    """Return which size, dtype or alignment of operands the kernels do not take.

    Args:
        rows: rows of the call.
        state: checkpoints.
        rings: rings with the dtype of rows, by what messages call them.
        wide: dtypes of checkpoints beside that of rows.
    """
    dtype, (value_dim, key_dim) = rows.q.dtype, state.shape[2:]
    if dtype not in ACTS:
        return f"q has dtype {dtype_name(dtype)}, it takes bfloat16 and float16"
    for name, tensor in (*rings.items(), ("out", rows.out)):
        if tensor.dtype != dtype:
            return f"{name} has dtype {dtype_name(tensor.dtype)}, q has {dtype_name(dtype)}"
    if state.dtype not in (dtype, *wide):
        return f"state has dtype {dtype_name(state.dtype)} and q {dtype_name(dtype)}"
    if rows.a.dtype != rows.b.dtype or rows.a.dtype not in (dtype, torch.float32):
        return f"a and b have dtypes {dtype_name(rows.a.dtype)} and {dtype_name(rows.b.dtype)}"
    if rows.q.shape[0] == 0:
        return "there are no rows"
    if key_dim != 128 or value_dim % 64 or value_dim > 256:
        return (
            f"heads have K = {key_dim} and V = {value_dim}, it takes K = 128, V = 64, 128, ..., 256"
        )
    rows_by_name = {"q": rows.q, "k": rows.k, "v": rows.v, "state": state, "out": rows.out}
    for name, tensor in (rows_by_name | rings).items():
        if row_alignment(tensor) < 16:
            return f"{name} does not lie on 16-byte boundaries"
        longest = max(tensor.stride()) * tensor.itemsize
        if longest >= 2**32:
            return f"{name} has a stride of {longest} bytes"
    return None


def defines_of(
    rows: Rows, gates: Gates, state: Tensor, config: CudaConfig, warp_bytes: int
) -> dict[str, Any]:
    """Macros of the kernels for the tensors of a call: what they do not take from `Params`."""
    return {
        "ACT": ACTS[rows.k.dtype],
        "STATE_BITS": 8 * state.itemsize,
        "GATE": TYPES[rows.a.dtype],
        "A_LOG": TYPES[readable(gates.A_log).dtype],
        "DT_BIAS": TYPES[readable(gates.dt_bias).dtype],
        "HEADS": rows.k.shape[1],
        "VALUE_HEADS": state.shape[1],
        "KEY_DIM": state.shape[3],
        "VALUE_DIM": state.shape[2],
        "STATE_STRIDE": state.stride(2) * state.itemsize,
        "SCALE_GROUP": GROUP_SIZE,
        "NEVER": NEVER,
        "SPLITS": config.splits,
        "WARPS": config.warps,
        "SHARED_BYTES": warp_bytes,
        "BLOCKS_PER_MULTIPROCESSOR": config.blocks,
        "EVICT_FIRST": int(config.evict_first),
    }


def _warp_bytes(state: Tensor, config: CudaConfig) -> int:
    """Bytes that a warp keeps in shared memory: its state rows, their factors, u and v."""
    value_dim, key_dim = state.shape[2:]
    row_bytes = key_dim * state.itemsize + _STAGED_BYTES
    if state.dtype == torch.int8:
        row_bytes += key_dim // GROUP_SIZE * SCALE_DTYPE.itemsize
    return value_dim // config.splits * row_bytes


def readable(parameter: Tensor) -> Tensor:
    """Return A_log or dt_bias as the kernel reads it: as it is, if it has at most 32 bits."""
    return parameter if parameter.dtype in TYPES else parameter.float()


def prepare(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> Callable[[Rows, Gates, State, RingView, FoldingBatch], None]:
    """Build the kernel and all but the addresses; return what launches calls of this kind."""
    num_requests, checkpoints = batch.num_requests(ring), state.values
    if num_requests == 0:
        return lambda rows, *others: rows.out.zero_()
    if state.scale is not None:
        _check_scale(state.scale)
    num_heads = num_requests * checkpoints.shape[1]
    config = choose_config(num_heads, checkpoints.shape[2], checkpoints.dtype)
    warp_bytes = _warp_bytes(checkpoints, config)
    is_strided = batch.slots is not None and batch.slots.stride(0) != 1
    has_blocks = is_strided or batch.is_fold_by_slot or batch.padding != -1
    defines = defines_of(rows, gates, checkpoints, config, warp_bytes) | {
        "MOST_TOKENS": 4 if batch.max_rows <= 4 else _MAX_TOKENS,
        "MOST_WINDOW": _MAX_WINDOW,
        "BY_BLOCK": int(has_blocks),
        "TOKEN_DECAY": int(ring.has_token_decay),
    }
    constants = constants_of(rows, gates, state, ring, batch)
    return launcher(SOURCE, "verify", defines, num_heads, rows.q, Params, constants, pointed_of)


def pointed_of(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> Pointed:
    """Tensors in the order of `_POINTERS`."""
    return (
        *rows[:5], readable(gates.A_log), readable(gates.dt_bias), *state, *ring[:3],
        rows.out, *ring[3:5], *batch[:3],
    )  # fmt: skip


def launcher(
    source: str, name: str, defines: dict[str, Any], num_heads: int, where: Tensor,
    params: type[ctypes.Structure], constants: ctypes.Structure, pointed: Callable[..., Pointed], *,
    fuses: bool = True,
) -> Callable[..., None]:  # fmt: skip
    """Build a kernel; return what launches it on calls of one kind, which differ in addresses.

    Args:
        source: file of the kernel.
        name: name of the kernel.
        defines: its macros, those of `defines_of` among them.
        num_heads: requests times value heads.
        where: a tensor on its device.
        params: the struct that it takes.
        constants: its part besides addresses.
        pointed: names the tensors of a call in the order of addresses.
        fuses: whether the compiler may round a product and a sum once.
    """
    warps, warp_bytes = defines["WARPS"], defines["SHARED_BYTES"]
    with torch.cuda.device_of(where):
        kernel = load_kernel(
            source, name, tuple(defines.items()), 32 * warps, warps * warp_bytes,
            where.device.index, fuses,
        )  # fmt: skip
    num_blocks = -(-num_heads * defines["SPLITS"] // warps)
    addresses = struct.Struct(f"{len(params._fields_) - len(constants._fields_)}P")
    rest = bytes(constants).ljust(ctypes.sizeof(params) - addresses.size, b"\0")

    def run(rows: Rows, gates: Gates, state: State, ring: Any, batch: FoldingBatch) -> None:
        found = pointed(rows, gates, state, ring, batch)
        packed = addresses.pack(*[0 if tensor is None else tensor.data_ptr() for tensor in found])
        with torch.cuda.device_of(rows.q):
            kernel.launch(num_blocks, params.from_buffer_copy(packed + rest))

    return run


def constants_of(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> ctypes.Structure:
    """Everything of `Params` that is no address."""
    q, k, v, a, b, out = rows
    num_requests, (checkpoints, scale) = batch.num_requests(ring), state
    return Constants(
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], a.stride(0), b.stride(0),
        *out.stride()[:2], *(stride * checkpoints.itemsize for stride in checkpoints.stride()[:2]),
        *((0, 0) if scale is None else (2 * stride for stride in scale.stride()[:2])),
        *ring.k.stride()[:3], *ring.u.stride()[:3], *ring.cum_log_decay.stride()[:2],
        num_requests, q.shape[0], q.shape[0] // num_requests,
        round_up_to_power_of_two(ring.k.shape[2]),
        NEVER if batch.fold_threshold is None else batch.fold_threshold,
        batch.cu_seqlens is None, not batch.keeps_padding, gates.use_qk_l2norm, batch.padding,
        1 if batch.slots is None else batch.slots.stride(0), batch.is_fold_by_slot,
        gates.output_scale(k.shape[2]), gates.beta_scale,
    )  # fmt: skip


def _check_scale(scale: Tensor) -> None:
    bytes_apart = [2 * stride for stride in scale.stride()[:2]]
    is_right = scale.stride(2) == scale.shape[3] and scale.data_ptr() % 16 == 0
    if not is_right or any(stride % 16 or stride >= 2**32 for stride in bytes_apart):
        raise UnsupportedError(
            "state_scale: the CUDA kernel takes factors of a head side by side on 16-byte "
            f"boundaries, got strides {scale.stride()} for shape {tuple(scale.shape)}"
        )
