"""Launches of the Triton kernels, which are imported then, so that this module needs no Triton."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec.ops._triton_support import capability, explain_tensors

__all__ = [
    "ROW_COUNTS",
    "LaunchConfig",
    "choose_launch",
    "explain",
    "explain_in_parts",
    "multiply",
    "multiply_in_parts",
    "num_parts",
]

_SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))  # 99 KiB a multiprocessor
_GROUP = 8  # tiles of rows that share their columns' weights in the L2 cache
_BUSY = 96  # programs that keep a device busy
_SHORTEST_PART = 1024  # terms
_REDUCE_BLOCK = 1024
ROW_COUNTS = (1, 17, 33, 65, 257)  # of which each has tiles of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Sizes of one launch; the bits of the result depend on none of them.

    Attributes:
        block_m: rows of a tile.
        block_n: columns of a tile.
        block_k: terms that are multiplied at once.
        num_stages: depth of the copy pipeline.
        num_warps: warps of a program.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


@functools.cache
def num_parts(num_columns: int, num_terms: int) -> int:
    """Return in how many parts the sums of a weight [F, D] are cut: by its shape, nothing else.

    A weight of few columns has too few tiles to keep a device busy with few rows.
    """
    parts = 1
    while (
        parts < 4
        and num_columns * parts < 128 * _BUSY
        and num_terms % (2 * parts * 128) == 0
        and num_terms // (2 * parts) >= _SHORTEST_PART
    ):
        parts *= 2
    return parts


@functools.cache
def choose_launch(target: tuple[int, int], num_rows: int, itemsize: int) -> LaunchConfig:
    """Pick the sizes for so many rows.

    Args:
        target: compute capability of the device.
        num_rows: N.
        itemsize: bytes of an element.
    """
    if itemsize == 4:
        sizes = (16, 64, 32, 2, 4) if num_rows <= 16 else (64, 64, 32, 2, 4)
    elif target in _SMALL_SHARED_MEMORY:
        sizes = (16, 64, 64, 4, 4) if num_rows <= 16 else (64, 64, 64, 3, 4)
    elif num_rows <= 16:
        sizes = (16, 64, 128, 5, 4)
    elif num_rows <= 32:
        sizes = (32, 64, 128, 4, 4)
    elif num_rows <= 64:
        sizes = (64, 128, 64, 4, 4)
    elif num_rows <= 256:
        sizes = (128, 128, 64, 4, 8)
    else:
        sizes = (128, 256, 64, 3, 8)
    return LaunchConfig(**dict(zip(LaunchConfig.__slots__, sizes, strict=True)))


def explain(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> str | None:
    """Return why the kernels do not support a call, or None."""
    named = [("x", x), ("weight", weight), ("out", out)]
    return explain_tensors(named if residual is None else [*named, ("residual", residual)])


def explain_in_parts(x: Tensor, weight: Tensor, parts: Tensor) -> str | None:
    """Return why the kernels do not support a call, or None."""
    return explain_tensors([("x", x), ("weight", weight), ("parts", parts)])


def multiply(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    out: Tensor,
    config: LaunchConfig | None = None,
) -> None:
    """Launch the kernels; `config` overrides the choice."""
    from hybridspec.ops.products.triton_multiply import add_parts_kernel

    num_rows, (num_columns, num_terms) = x.shape[0], weight.shape
    if out.numel() == 0:
        return
    num = num_parts(num_columns, num_terms)
    if num == 1:
        _launch(x, weight, residual, out, 1, config)
        return
    parts = out.new_empty(num, num_rows, num_columns, dtype=torch.float32)
    _launch(x, weight, None, parts, num, config)
    with torch.cuda.device_of(x):
        add_parts_kernel[(num_rows, -(-num_columns // _REDUCE_BLOCK))](
            parts, residual, out, num_rows, 0 if residual is None else residual.stride(0),
            out.stride(0),
            F=num_columns,
            PARTS=num,
            BLOCK=_REDUCE_BLOCK,
            num_warps=4,
        )  # fmt: skip


def multiply_in_parts(x: Tensor, weight: Tensor, parts: Tensor) -> None:
    """Launch the first kernel alone."""
    if parts.numel():
        _launch(x, weight, None, parts, parts.shape[0], None)


def _launch(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    out: Tensor,
    parts: int,
    config: LaunchConfig | None,
) -> None:
    from hybridspec.ops.products.triton_multiply import multiply_kernel

    (num_rows, num_terms), num_columns = x.shape, weight.shape[0]
    if config is None:
        config = choose_launch(capability(x), num_rows, x.element_size())
    tiles = -(-num_rows // config.block_m) * -(-num_columns // config.block_n)
    with torch.cuda.device_of(x):
        multiply_kernel[(tiles, parts)](
            x, weight, residual, out, num_rows, x.stride(0), weight.stride(0),
            0 if residual is None else residual.stride(0), out.stride(-2),
            F=num_columns,
            D=num_terms,
            PARTS=parts,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP=_GROUP,
            num_stages=config.num_stages,
            num_warps=config.num_warps,
        )  # fmt: skip
