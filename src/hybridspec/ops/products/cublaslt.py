"""Products by cuBLASLt, of whose algorithms the caller chooses one.

torch takes the first algorithm that the library proposes. Which one is the quickest depends on the
sizes; with few rows it is often another. This is the library that torch has loaded, called through
ctypes: its C interface is that of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["WORKSPACE_BYTES", "Case", "Product", "candidates", "explain", "library_version"]

WORKSPACE_BYTES = 32 << 20
# What a proposal may need: with other limits the library proposes others.
_WORKSPACE_LIMITS = (0, 1 << 20, 4 << 20, WORKSPACE_BYTES)
_ALIGNMENT = 256  # bytes, that the library takes for granted
_PROPOSALS = 16
# Values of the library's enumerations (cublasLt.h, cublas_api.h, library_types.h).
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_FP32, _TRANSPOSED = 68, 1
_DESC_TRANSA = 3
_LAYOUT_COUNT, _LAYOUT_DISTANCE = 5, 6
_PREFERENCE_WORKSPACE, _PREFERENCE_REDUCTION = 1, 3
_REDUCTION_FP32 = 2  # parts of a split sum are added in fp32, not in the dtype of the result


class Case(NamedTuple):
    """A product y = x W^T (+ y) of one size, or its parts.

    Attributes:
        rows: N of x [N, D] and y [N, F].
        columns: F of W [F, D].
        terms: D.
        dtype: of x and W, bfloat16 or float16.
        out_dtype: of y, that or float32.
        adds: whether to y is added what it holds.
        parts: P, into which the terms are cut; with more than one, y is [P, N, F] and holds the
            sums of each.
    """

    rows: int
    columns: int
    terms: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    adds: bool = False
    parts: int = 1


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the library that torch has loaded, found by its name."""
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")


@functools.cache
def explain() -> str | None:
    """Return why the library cannot be called here, or None."""
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    try:
        _library()
    except OSError as error:
        return f"cuBLASLt cannot be loaded ({error})"
    return None


def library_version() -> int:
    """Return the library's version as it numbers it; the meaning of an algorithm goes with it."""
    function = _library().cublasLtGetVersion
    function.restype = c_size_t
    return int(function())


@functools.cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", byref(handle))
    return handle


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: cuBLAS status {status}")


class _Sizes:
    """What the library wants to know of a case, in its order: by columns, W transposed.

    Its objects stay as long as the process: see `_sizes`.
    """

    def __init__(self, case: Case) -> None:
        self.operation = c_void_p()
        _call("cublasLtMatmulDescCreate", byref(self.operation), _COMPUTE_FP32, _TYPES[torch.float])
        transposed = c_int32(_TRANSPOSED)
        _call(
            "cublasLtMatmulDescSetAttribute",
            self.operation, _DESC_TRANSA, byref(transposed), c_size_t(4),
        )  # fmt: skip
        part, size = case.terms // case.parts, case.rows * case.columns
        self.weight = _layout(part, case.columns, case.dtype, case.terms, case.parts, part)
        self.x = _layout(part, case.rows, case.dtype, case.terms, case.parts, part)
        self.out = _layout(case.columns, case.rows, case.out_dtype, case.columns, case.parts, size)


@functools.cache
def _sizes(case: Case) -> _Sizes:
    return _Sizes(case)


def _layout(
    rows: int, columns: int, dtype: torch.dtype, stride: int, count: int, distance: int
) -> c_void_p:
    """Describe matrices by columns: `count` of them, each `distance` elements behind the last."""
    layout = c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate",
        byref(layout), _TYPES[dtype], c_uint64(rows), c_uint64(columns), c_int64(stride),
    )  # fmt: skip
    for attribute, value in (
        (_LAYOUT_COUNT, c_int32(count)),
        (_LAYOUT_DISTANCE, c_int64(distance)),
    ):
        _call(
            "cublasLtMatrixLayoutSetAttribute",
            layout, attribute, byref(value), c_size_t(ctypes.sizeof(value)),
        )  # fmt: skip
    return layout


def candidates(case: Case, device: int) -> list[bytes]:
    """Return the algorithms that the library proposes, each once.

    Args:
        case: of which product.
        device: index of the device.
    """
    sizes, found = _sizes(case), dict[bytes, None]()
    for limit in _WORKSPACE_LIMITS:
        preference, workspace = c_void_p(), c_size_t(limit)
        _call("cublasLtMatmulPreferenceCreate", byref(preference))
        for attribute, value in (
            (_PREFERENCE_WORKSPACE, workspace),
            (_PREFERENCE_REDUCTION, c_uint32(_REDUCTION_FP32)),
        ):
            _call(
                "cublasLtMatmulPreferenceSetAttribute",
                preference, attribute, byref(value), c_size_t(ctypes.sizeof(value)),
            )  # fmt: skip
        proposals, count = (_Proposal * _PROPOSALS)(), c_int(0)
        status = _library().cublasLtMatmulAlgoGetHeuristic(
            _handle(device), sizes.operation, sizes.weight, sizes.x, sizes.out, sizes.out,
            preference, _PROPOSALS, proposals, byref(count),
        )  # fmt: skip
        _call("cublasLtMatmulPreferenceDestroy", preference)
        good = [one for one in proposals[: count.value] if one.status == 0] if not status else []
        found |= dict.fromkeys(bytes(one.algorithm) for one in good)
    return list(found)


class Product:
    """Products of one case by one algorithm.

    Args:
        case: which product.
        algorithm: one of `candidates`, also of another process with the same library and device.
        workspace: WORKSPACE_BYTES of scratch on the device; calls that share it do not overlap.

    Raises:
        RuntimeError: if the library does not support the case by that algorithm.
    """

    def __init__(self, case: Case, algorithm: bytes, workspace: Tensor) -> None:
        self.case, self._sizes, self._workspace = case, _sizes(case), workspace
        self._algorithm = _Algorithm.from_buffer_copy(algorithm)
        self._handle = _handle(workspace.device.index)
        self._factors = c_float(1.0), c_float(float(case.adds))
        sizes, checked = self._sizes, _Proposal()
        _call(
            "cublasLtMatmulAlgoCheck",
            self._handle, sizes.operation, sizes.weight, sizes.x, sizes.out, sizes.out,
            byref(self._algorithm), byref(checked),
        )  # fmt: skip
        if checked.workspace > workspace.numel():
            raise RuntimeError(f"cuBLASLt: {checked.workspace} bytes of workspace are needed")

    @staticmethod
    def takes(*tensors: Tensor) -> bool:
        """Whether rows lie one behind the other, and where the library expects them to."""
        return all(one.is_contiguous() and one.data_ptr() % _ALIGNMENT == 0 for one in tensors)

    def run(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Enqueue the product on the current stream.

        Args:
            x: rows, [N, D]; in.
            weight: [F, D]; in.
            out: [N, F], or its parts [P, N, F]; in-out where the case adds, else out.
        """
        sizes, (alpha, beta) = self._sizes, self._factors
        place = c_void_p(out.data_ptr())
        _call(
            "cublasLtMatmul",
            self._handle, sizes.operation, byref(alpha), c_void_p(weight.data_ptr()), sizes.weight,
            c_void_p(x.data_ptr()), sizes.x, byref(beta), place, sizes.out, place, sizes.out,
            byref(self._algorithm), c_void_p(self._workspace.data_ptr()),
            c_size_t(self._workspace.numel()),
            c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
        )  # fmt: skip
