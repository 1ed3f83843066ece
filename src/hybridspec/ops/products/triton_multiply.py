"""Triton kernels of a product whose sums have one order, whatever the tiles.

A sum is cut into PARTS by the weight, and each part has a program. A part is added up term by term,
in the order of the matrix instruction and from zero on; then the parts are added in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_parts_kernel", "multiply_kernel"]


@triton.jit
def _tile_of(
    pid, num_rows,
    F: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tile of rows and of columns: GROUP tiles of rows share the weights of their columns."""
    m_tiles = tl.cdiv(num_rows, BLOCK_M)
    n_tiles: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    group = pid // (GROUP * n_tiles)
    size = tl.minimum(m_tiles - group * GROUP, GROUP)
    place = pid % (GROUP * n_tiles)
    return group * GROUP + place % size, place // size


@triton.jit(do_not_specialize=["num_rows"])
def multiply_kernel(
    # inputs: x [N, D]; weight [F, D]; residual [N, F] or None
    x_ptr, weight_ptr, residual_ptr,
    # output: [N, F]; or, if there is more than one, the parts, [PARTS, N, F] fp32
    out_ptr,
    num_rows, x_stride, weight_stride, residual_stride, out_stride,
    F: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Add up one part of a tile."""
    m_tile, n_tile = _tile_of(tl.program_id(0), num_rows, F, BLOCK_M, BLOCK_N, GROUP)
    PART: tl.constexpr = D // PARTS
    IS_EVEN: tl.constexpr = PART % BLOCK_K == 0
    tl.static_assert(D % PARTS == 0)

    rows = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    terms = tl.arange(0, BLOCK_K)
    is_row, is_column = rows < num_rows, columns < F
    # Columns that are outside are read from the last one, and not stored.
    safe_columns = tl.where(is_column, columns, F - 1).to(tl.int64)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + terms[None, :]
    weight_ptrs = weight_ptr + safe_columns[None, :] * weight_stride + terms[:, None]
    part = tl.program_id(1)
    x_ptrs += part * PART
    weight_ptrs += part * PART
    out_ptr += tl.cast(part, tl.int64) * num_rows * F

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, PART, BLOCK_K):
        if IS_EVEN:
            x = tl.load(x_ptrs, mask=is_row[:, None], other=0.0)
            weight = tl.load(weight_ptrs)
        else:
            is_term = terms < PART - first
            x = tl.load(x_ptrs, mask=is_row[:, None] & is_term[None, :], other=0.0)
            weight = tl.load(weight_ptrs, mask=is_term[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K

    mask = is_row[:, None] & is_column[None, :]
    if residual_ptr is not None:
        residual_rows = residual_ptr + rows.to(tl.int64)[:, None] * residual_stride
        total += tl.load(residual_rows + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    out_rows = out_ptr + rows.to(tl.int64)[:, None] * out_stride
    tl.store(out_rows + columns[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(
    # inputs: parts [PARTS, N, F] fp32; residual [N, F] or None
    parts_ptr, residual_ptr,
    # output [N, F]
    out_ptr,
    num_rows, residual_stride, out_stride,
    F: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts of a piece of a row, in order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < F
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        place = (tl.cast(part, tl.int64) * num_rows + row) * F
        total += tl.load(parts_ptr + place + columns, mask=mask, other=0.0)
    if residual_ptr is not None:
        added = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        total += added.to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, total.to(out_ptr.dtype.element_ty), mask=mask)
