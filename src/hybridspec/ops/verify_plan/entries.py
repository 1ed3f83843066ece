"""For attention backends with one entry per request: compacted groups, copied page tables."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._checks import INTEGERS, Dims, check, check_dtype
from hybridspec.ops._library import register_kernel
from hybridspec.ops.verify_plan import cpu, launch
from hybridspec.ops.verify_plan.call import Entries

__all__ = ["compact_groups", "copy_page_table"]


def compact_groups(
    requests: Tensor,
    seq_len: Tensor,
    marks: Tensor,
    *,
    num_entries: int,
    hold_request: int,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn rows into one entry per group of rows; nothing is modified.

    The i-th row whose mark is above 0 ends group i: entry i = (mark, seq_len, request) of that row.
    Entries past the last group are (0, 0, hold_request).

    Args:
        requests: request of each row, [n], int32 or int64; in.
        seq_len: tokens that each row sees, [n], int32 or int64; in.
        marks: number of rows of the group that ends at this row, else 0, [n], int32 or int64; in.
        num_entries: entries of the result. Groups past them are an error that is found on a CPU
            only; elsewhere they are dropped.
        hold_request: request of the entries that are left over.
        backend: "auto", "triton" or "reference".

    Returns:
        Query lengths, sequence lengths and requests, each [num_entries], int32.

    Raises:
        ValueError, TypeError: if a shape or dtype is wrong, or on a CPU there are too many groups.
        UnsupportedError: if the backend does not support the call.
    """
    dims: Dims = {}
    for name, tensor in (("requests", requests), ("seq_len", seq_len), ("marks", marks)):
        check(name, tensor, "n", dims)
        check_dtype(name, tensor, *INTEGERS)
    if num_entries < 0:
        raise ValueError(f"num_entries: expected at least 0, got {num_entries}")
    columns = [part.contiguous() for part in (requests, seq_len, marks)]
    out = Entries(*marks.new_empty(3, num_entries, dtype=torch.int32))
    _compact_groups(*columns, hold_request, out, backend=backend)
    return out


def copy_page_table(
    page_table: Tensor, source: Tensor, requests: Tensor, *, backend: str = "auto"
) -> None:
    """Copy the page tables of a batch: page_table[i] <- source[requests[i], :width].

    Args:
        page_table: [B, width], integer, any strides; out.
        source: page table of every request, [S, >= width], integer, any strides; in.
        requests: [B], int32 or int64, below S; in.
        backend: "auto", "triton" or "reference".

    Raises:
        ValueError, TypeError: if a shape or dtype is wrong.
        UnsupportedError: if the backend does not support the call.
    """
    _copy_page_table(page_table, source, requests.contiguous(), backend=backend)


def _check_copy_page_table(page_table: Tensor, source: Tensor, requests: Tensor) -> None:
    dims: Dims = {}
    check("page_table", page_table, "B width", dims)
    check("source", source, "S pages", dims)
    check("requests", requests, "B", dims)
    check_dtype("page_table", page_table, *INTEGERS)
    check_dtype("source", source, *INTEGERS)
    check_dtype("requests", requests, *INTEGERS)
    if dims["pages"] < dims["width"]:
        raise ValueError(
            f"source: expected at least {dims['width']} columns as page_table has, "
            f"got {dims['pages']}"
        )


_copy_page_table = register_kernel(
    "verify_plan.copy_page_table",
    launch.explain,
    launch.copy_page_table,
    cpu.copy_page_table,
    _check_copy_page_table,
)


_compact_groups = register_kernel(
    "verify_plan.compact_groups", launch.explain, launch.compact_groups, cpu.compact_groups
)
