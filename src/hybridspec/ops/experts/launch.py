"""Launches of the Triton kernels, which are imported then, so that this module needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec.ops._checks import dtype_name
from hybridspec.ops._triton_support import (
    explain_tensors,
    round_up_to_power_of_two,
)
from hybridspec.ops.experts.call import Matrices

__all__ = ["LaunchConfig", "Tile", "choose_config", "chunk_of", "explain", "explain_few", "mix"]

_MOST_EXPERTS = 2048
_MOST_ROWS = 256  # above, the grouped product is quicker, where it serves
_FEW_ROWS = 4
_PAIRS = 4096  # of assignments that a program looks at together with its rows
_SUM_BLOCK = 1024
_WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Sizes of one launch of a product.

    Attributes:
        columns: of the output that a program makes; of gate and up as many each.
        inner: of the inner dimension, in one product.
        stages: depth of the copy pipeline.
    """

    columns: int
    inner: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Sizes of the launches.

    Attributes:
        rows: assignments of an expert in one product.
        gate_up, down: of the products.
    """

    rows: int
    gate_up: Tile
    down: Tile


def choose_config(num_rows: int, itemsize: int) -> LaunchConfig:
    """Choose the launches for a number of rows and bytes of an element.

    Tuned on an H200, sizes of Qwen3.5-35B-A3B in bf16, 2026-12-01 (`docs/kernels/engine.md`).
    """
    wide = 4 // itemsize
    if num_rows <= _FEW_ROWS:
        return LaunchConfig(
            rows=16,
            gate_up=Tile(columns=32, inner=128 * wide, stages=3),
            down=Tile(columns=64, inner=128 * wide, stages=3),
        )
    return LaunchConfig(
        rows=16,
        gate_up=Tile(columns=32, inner=64 * wide, stages=4),
        down=Tile(columns=128, inner=64 * wide, stages=3),
    )


def explain(
    x: Tensor, scores: Tensor, matrices: Matrices, out: Tensor, per_row: int, is_normalized: bool
) -> str | None:
    """Return why the Triton kernels do not support a call, or None."""
    named = [("x", x), ("scores", scores), ("out", out)]
    named += zip(Matrices._fields, matrices, strict=True)
    reason = explain_tensors(named)
    if reason is not None:
        return reason
    for name, matrix in zip(Matrices._fields, matrices, strict=True):
        if matrix.stride(-1) != 1:
            return f"{name} has a last stride of {matrix.stride(-1)}"
    if x.is_cuda and x.dtype is not torch.bfloat16:
        return f"was run on a GPU in bfloat16 only, not {dtype_name(x.dtype)}"
    num_experts = matrices.gate_up.shape[0]
    if num_experts > _MOST_EXPERTS:
        return f"there are {num_experts} experts, the kernel takes up to {_MOST_EXPERTS}"
    return None


def explain_few(
    x: Tensor, scores: Tensor, matrices: Matrices, out: Tensor, per_row: int, is_normalized: bool
) -> str | None:
    """Return why the kernels do not support a call or are not the quickest for it, or None."""
    if x.shape[0] > _MOST_ROWS and x.dtype is torch.bfloat16:
        return f"x has {x.shape[0]} rows, above {_MOST_ROWS} the grouped product is quicker"
    return explain(x, scores, matrices, out, per_row, is_normalized)


def mix(
    x: Tensor, scores: Tensor, matrices: Matrices, out: Tensor, per_row: int, is_normalized: bool
) -> None:
    """Launch the kernels; arguments as `cpu.mix`."""
    if x.numel() == 0:
        return
    config = choose_config(x.shape[0], x.element_size())
    with torch.cuda.device_of(x):
        experts, weights = _route(scores, per_row, is_normalized)
        hidden = _gate_up(x, experts, matrices, config)
        made = _down(hidden, experts, matrices, config)
        _sum(made, weights, out)


def _route(scores: Tensor, per_row: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Return experts [N, per_row] int32, and their weights and the shared one's, fp32."""
    from hybridspec.ops.experts.triton_mix import route_kernel

    num_rows, num_experts = scores.shape[0], scores.shape[1] - 1
    experts = scores.new_empty(num_rows, per_row, dtype=torch.int32)
    weights = scores.new_empty(num_rows, per_row + 1, dtype=torch.float32)
    block_e = round_up_to_power_of_two(num_experts)
    route_kernel[(num_rows,)](
        scores, experts, weights, num_experts, scores.stride(0),
        PER_ROW=per_row,
        IS_NORMALIZED=is_normalized,
        BLOCK_E=block_e,
        BLOCK_P=round_up_to_power_of_two(per_row + 1),
        num_warps=max(block_e // 512, 1),
        enable_fp_fusion=True,
    )  # fmt: skip
    return experts, weights


def _gate_up(x: Tensor, experts: Tensor, matrices: Matrices, config: LaunchConfig) -> Tensor:
    """Return hidden rows of each row's experts [N per_row, F], then of the shared one [N, G]."""
    from hybridspec.ops.experts.triton_mix import gate_up_kernel

    (num_rows, size), (num_experts, _, inner) = x.shape, matrices.down.shape
    shared_inner, count = matrices.shared_down.shape[1], experts.numel()
    hidden = x.new_empty(count * inner + num_rows * shared_inner)
    tile = config.gate_up
    groups = 1 + min(count, num_experts)
    gate_up_kernel[(-(-max(inner, shared_inner) // tile.columns), groups)](
        x, experts, matrices.gate_up, matrices.shared_gate_up, hidden, num_rows, count, size,
        inner, shared_inner,
        x.stride(0), *matrices.gate_up.stride()[:2], matrices.shared_gate_up.stride(0),
        PER_ROW=experts.shape[1],
        IS_DENSE=count >= num_experts,
        BLOCK_M=config.rows,
        BLOCK_F=tile.columns,
        BLOCK_K=_block_k(tile, size),
        CHUNK=chunk_of(count, config.rows),
        num_warps=_WARPS,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return hidden


def _down(
    hidden: Tensor,
    experts: Tensor,
    matrices: Matrices,
    config: LaunchConfig,
) -> Tensor:
    """Return what each row's experts, then the shared one, make of it, [N (per_row + 1), D]."""
    from hybridspec.ops.experts.triton_mix import down_kernel

    num_experts, size, inner = matrices.down.shape
    shared_inner, num_rows, count = matrices.shared_down.shape[1], len(experts), experts.numel()
    made = hidden.new_empty(count + num_rows, size, dtype=torch.float32)
    tile = config.down
    groups = 1 + min(count, num_experts)
    down_kernel[(-(-size // tile.columns), groups)](
        hidden, experts, matrices.down, matrices.shared_down, made, num_rows, count, size, inner,
        shared_inner, *matrices.down.stride()[:2], matrices.shared_down.stride(0),
        IS_DENSE=count >= num_experts,
        BLOCK_M=config.rows,
        BLOCK_D=tile.columns,
        BLOCK_K=_block_k(tile, max(inner, shared_inner)),
        CHUNK=chunk_of(count, config.rows),
        num_warps=_WARPS,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return made


def _sum(made: Tensor, weights: Tensor, out: Tensor) -> None:
    from hybridspec.ops.experts.triton_mix import sum_kernel

    num_rows, size = out.shape
    block = min(round_up_to_power_of_two(size), _SUM_BLOCK)
    sum_kernel[(num_rows, -(-size // block))](
        made, weights, out, num_rows, size, out.stride(0),
        PER_ROW=weights.shape[1] - 1,
        BLOCK_D=block,
        num_warps=max(block // 256, 1),
        enable_fp_fusion=True,
    )  # fmt: skip


def _block_k(tile: Tile, inner: int) -> int:
    return max(min(tile.inner, round_up_to_power_of_two(inner)), 16)


def chunk_of(count: int, rows: int) -> int:
    """Return how many of `count` assignments a program of so many rows looks at together."""
    return min(round_up_to_power_of_two(count), _PAIRS // rows)
