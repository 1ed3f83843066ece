"""Rows and their sampling parameters, gathered in the order of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._checks import Dims, check, check_dtype, check_last_stride
from hybridspec.ops._library import register_kernel
from hybridspec.ops.verify_plan import cpu, launch
from hybridspec.ops.verify_plan.sampling_columns import SamplingColumns

__all__ = ["compact_hidden", "compact_sampling"]


def compact_hidden(
    hidden: Tensor, sources: Tensor, *, out: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Gather rows: out[i] = hidden[sources[i]], zeros where sources[i] < 0; inputs stay.

    Args:
        hidden: [M, D], last stride 1; in.
        sources: [N], int32, below M; in.
        out: [N, D], dtype of `hidden`, last stride 1; out.
        backend: "auto", "triton" or "reference".

    Returns:
        `out`, or a new tensor.

    Raises:
        ValueError, TypeError: if a shape, stride or dtype is wrong.
        UnsupportedError: if the backend does not support the call.
    """
    if out is None:
        dims: Dims = {}
        check("hidden", hidden, "M D", dims)
        check("sources", sources, "N", dims)
        out = hidden.new_empty(dims["N"], dims["D"])
    _compact_hidden(hidden, sources, out, backend=backend)
    return out


def compact_sampling(
    requests: SamplingColumns, sources: Tensor, *,
    rows_per_request: int, out: SamplingColumns | None = None, backend: str = "auto",
) -> SamplingColumns:  # fmt: skip
    """Spread each request's sampling parameters over its chosen rows; inputs stay as they are.

    Args:
        requests: columns [B]; in.
        sources: [N], int32, request * rows_per_request + row, or negative for a padding row; in.
        rows_per_request: k + 1, the stride of `sources`.
        out: columns [N]; out. Padding rows are greedy with every filter off.
        backend: "auto", "triton" or "reference".

    Returns:
        `out`, or new columns.

    Raises:
        ValueError, TypeError: if a shape or dtype is wrong.
        UnsupportedError: if the backend does not support the call.
    """
    if out is None:
        check("sources", sources, "N", {})
        out = SamplingColumns.create(sources.shape[0], device=sources.device)
    _compact_sampling(requests, sources, rows_per_request, out, backend=backend)
    return out


def _check_compact_hidden(hidden: Tensor, sources: Tensor, out: Tensor) -> None:
    dims: Dims = {}
    check("hidden", hidden, "M D", dims)
    check("sources", sources, "N", dims)
    check_dtype("sources", sources, torch.int32)
    check_last_stride("hidden", hidden)
    check("out", out, "N D", dims)
    check_dtype("out", out, hidden.dtype)
    check_last_stride("out", out)


_compact_hidden = register_kernel(
    "verify_plan.compact_hidden",
    launch.explain,
    launch.compact_hidden,
    cpu.compact_hidden,
    _check_compact_hidden,
)


def _check_compact_sampling(
    requests: SamplingColumns, sources: Tensor, rows_per_request: int, out: SamplingColumns
) -> None:
    dims: Dims = {}
    check("sources", sources, "N", dims)
    check_dtype("sources", sources, torch.int32)
    _check_columns("requests", requests, "B", dims)
    if rows_per_request < 1:
        raise ValueError(f"rows_per_request: expected at least 1, got {rows_per_request}")
    _check_columns("out", out, "N", dims)


_compact_sampling = register_kernel(
    "verify_plan.compact_sampling",
    launch.explain_columns,
    launch.compact_sampling,
    cpu.compact_sampling,
    _check_compact_sampling,
)


def _check_columns(name: str, columns: SamplingColumns, size: str, dims: Dims) -> None:
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64)
    for field, tensor, dtype in zip(columns.__slots__, columns.tensors(), kinds, strict=True):
        check(f"{name}.{field}", tensor, size, dims)
        check_dtype(f"{name}.{field}", tensor, dtype)
        check_last_stride(f"{name}.{field}", tensor)
