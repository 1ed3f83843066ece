"""How the CUDA C++ kernel for one row is launched: what it serves, its build, its arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops._checks import dtype_name, row_alignment
from hybridspec.ops._nvrtc import explain_compiler, load_kernel
from hybridspec.ops._triton_support import capability
from hybridspec.ops.experts.call import Matrices

__all__ = ["THREADS", "Params", "defines_of", "explain", "prepare", "shared_bytes_of"]

SOURCE = "experts/mix_row.cu"
THREADS = 512
_TARGETS = ((9, 0),)  # where it was measured
_LANES = 256  # values that the lanes of a warp take at once
_MOST_PER_ROW = 8
_MOST_VALUES = 4608  # that a warp holds of a column of the output
_POINTERS = (
    "norm_weight", "router", "gate_up", "down", "shared_gate_up", "shared_down", "row", "scores",
    "hidden", "meeting",
)  # fmt: skip
_STRIDES = (
    "router_stride", "gate_up_stride_e", "gate_up_stride_f", "down_stride_e", "down_stride_d",
    "shared_gate_up_stride", "shared_down_stride",
)  # fmt: skip


class Params(ctypes.Structure):
    """What the kernel takes: see mix_row.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_uint64) for name in _STRIDES),
        ("eps", ctypes.c_float),
    )


def explain(
    x: Tensor, norm_weight: Tensor, router: Tensor, matrices: Matrices, meeting: Tensor,
    eps: float, per_row: int, is_normalized: bool,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve a call, or return None."""
    if not x.is_cuda:
        return "the tensors are not on a CUDA device"
    if capability(x) not in _TARGETS:
        return "it was measured on sm_90 only"
    return explain_tensors(x, norm_weight, router, matrices, per_row) or explain_compiler()


def explain_tensors(
    x: Tensor, norm_weight: Tensor, router: Tensor, matrices: Matrices, per_row: int
) -> str | None:
    """Say which size, dtype or alignment of a call the kernel does not take, or return None."""
    if x.shape[0] != 1:
        return f"x has {x.shape[0]} rows, it takes one"
    if x.dtype is not torch.bfloat16 or norm_weight.dtype is not torch.float32:
        return f"x has dtype {dtype_name(x.dtype)}, it takes bfloat16 with a norm in float32"
    size, inner, shared = x.shape[1], matrices.down.shape[2], matrices.shared_down.shape[1]
    if size % _LANES or inner % _LANES or shared % _LANES:
        return f"sizes are {size}, {inner} and {shared}, it takes multiples of {_LANES}"
    if per_row > _MOST_PER_ROW or per_row * inner + shared > _MOST_VALUES:
        return f"a row has {per_row} experts of {inner}, and one of {shared}: more than it holds"
    named = {"x": x, "norm_weight": norm_weight, "router": router, **matrices._asdict()}
    for name, tensor in named.items():
        if row_alignment(tensor) < 16:
            return f"{name} does not lie on 16-byte boundaries"
    return None


def defines_of(
    size: int, inner: int, shared: int, experts: int, per_row: int, is_normalized: bool
) -> dict[str, Any]:
    """Return the macros of the kernel."""
    return {
        "THREADS": THREADS, "SIZE": size, "INNER": inner, "SHARED": shared, "EXPERTS": experts,
        "PER_ROW": per_row, "IS_NORMALIZED": int(is_normalized),
    }  # fmt: skip


def shared_bytes_of(size: int, inner: int, shared: int, per_row: int) -> int:
    """Bytes of a block: the row, hidden values, experts and weights, a sum of each warp."""
    return 2 * (size + per_row * inner + shared) + 4 * (2 * per_row + 1 + THREADS // 32)


def prepare(
    x: Tensor, norm_weight: Tensor, router: Tensor, matrices: Matrices, meeting: Tensor,
    eps: float, per_row: int, is_normalized: bool,
) -> Callable[..., None]:  # fmt: skip
    """Build the kernel; return what launches calls of this kind."""
    (experts, size, inner), shared = matrices.down.shape, matrices.shared_down.shape[1]
    defines = defines_of(size, inner, shared, experts, per_row, is_normalized)
    with torch.cuda.device_of(x):
        kernel = load_kernel(
            SOURCE, "mix_row", tuple(defines.items()), THREADS,
            shared_bytes_of(size, inner, shared, per_row), x.device.index,
        )  # fmt: skip
    blocks = _multiprocessors(x.device)
    strides = [2 * stride for stride in (
        router.stride(0), *matrices.gate_up.stride()[:2], *matrices.down.stride()[:2],
        matrices.shared_gate_up.stride(0), matrices.shared_down.stride(0),
    )]  # fmt: skip

    def run(
        x: Tensor, norm_weight: Tensor, router: Tensor, matrices: Matrices, meeting: Tensor,
        *_: Any,
    ) -> None:  # fmt: skip
        scores = x.new_empty(experts + 1)
        hidden = x.new_empty(per_row * inner + shared)
        pointed = (norm_weight, router, *matrices, x, scores, hidden, meeting)
        params = Params(*(tensor.data_ptr() for tensor in pointed), *strides, eps)
        with torch.cuda.device_of(x):
            kernel.launch_together(blocks, params)

    return run


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
