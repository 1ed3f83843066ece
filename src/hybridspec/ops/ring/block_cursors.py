"""Cursors of engines that mark blocks one step ahead: commit and reset for these.

The marks of the next step follow from the cursors as soon as these have moved, and stay in the
block until then, so that a step needs nothing but the block table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridspec.ops._checks import INTEGERS, Dims, check, check_devices, check_dtype, check_option
from hybridspec.ops._library import Written, register_kernel
from hybridspec.ops._triton_support import explain_tensors
from hybridspec.ops.ring.contracts import check_capacity, check_cursors

__all__ = ["commit_blocks", "reset_blocks"]

_BLOCK = 128
_FLAGS = (torch.bool, torch.int8, *INTEGERS)


class BlockCursors(NamedTuple):
    """Cursors and marks of blocks, [S].

    Attributes:
        ring_start: first live ring row, int32.
        history_len: live ring rows, int32.
        is_fold: whether the next step folds, int8.
    """

    ring_start: Tensor
    history_len: Tensor
    is_fold: Tensor


def commit_blocks(
    ring_start: Tensor, history_len: Tensor, is_fold: Tensor, blocks: Tensor, num_committed: Tensor,
    *,
    ring_capacity: int, most_unmarked: int, padding: int = -1, backend: str = "auto",
) -> None:  # fmt: skip
    """Move the cursors of a step over its committed rows, and mark blocks for the next step.

    With n = num_committed, where the block is marked: ring_start += history_len (mod R) if n > 0,
    and history_len = n; elsewhere history_len += n. Then is_fold = history_len > most_unmarked.
    Errors and numerics as in `commit`.

    Args:
        ring_start: first live ring row of each block, [S], int32; contiguous; in-out.
        history_len: live ring rows of each block, [S], int32; contiguous; in-out.
        is_fold: the marks that this step's verify got, [S], int8; contiguous; in-out.
        blocks: block of each request, padding if at most `padding`, no block twice, [B], int32 or
            int64; any stride; in.
        num_committed: rows to keep, no more than the step had, [B], int32 or int64; ignored in
            padding; any stride; in.
        ring_capacity: ring rows (R), a power of two.
        most_unmarked: longest window that the next step does not fold.
        padding: largest number that is no block, at least -1.
        backend: "auto", "triton" or "reference".
    """
    _commit_blocks(
        BlockCursors(ring_start, history_len, is_fold), blocks, num_committed, ring_capacity,
        most_unmarked, padding, backend=backend,
    )  # fmt: skip


def reset_blocks(
    ring_start: Tensor, history_len: Tensor, is_fold: Tensor, blocks: Tensor, is_reset: Tensor, *,
    most_unmarked: int, padding: int = -1, backend: str = "auto",
) -> None:  # fmt: skip
    """Zero the cursors of some requests' blocks, and mark them if even empty windows are folded.

    ring_start = history_len = 0 and is_fold = 0 > most_unmarked, where is_reset is not 0.
    Arguments, errors and numerics as in `commit_blocks`, but for:

    Args:
        is_fold: marks, [S], int8; contiguous; in-out.
        is_reset: which requests, [B], bool or an integer; any stride; in.
    """
    _reset_blocks(
        BlockCursors(ring_start, history_len, is_fold), blocks, is_reset, most_unmarked, padding,
        backend=backend,
    )  # fmt: skip


def _check(cursors: BlockCursors, most_unmarked: int, padding: int, **rows: Tensor) -> None:
    dims: Dims = {}
    check_cursors(dims, ring_start=cursors.ring_start, history_len=cursors.history_len)
    check("is_fold", cursors.is_fold, "S", dims)
    check_dtype("is_fold", cursors.is_fold, torch.int8)
    for name, tensor in rows.items():
        check(name, tensor, "B", dims)
        check_dtype(name, tensor, *(_FLAGS if name == "is_reset" else INTEGERS))
    check_devices(**cursors._asdict(), **rows)
    check_option("most_unmarked", most_unmarked, int, low=-(2**31), high=2**31 - 1)
    check_option("padding", padding, int, low=-1)


def _check_commit(
    cursors: BlockCursors, blocks: Tensor, num_committed: Tensor, ring_capacity: int,
    most_unmarked: int, padding: int,
) -> None:  # fmt: skip
    _check(cursors, most_unmarked, padding, blocks=blocks, num_committed=num_committed)
    check_capacity(ring_capacity)


def _check_reset(
    cursors: BlockCursors, blocks: Tensor, is_reset: Tensor, most_unmarked: int, padding: int
) -> None:
    _check(cursors, most_unmarked, padding, blocks=blocks, is_reset=is_reset)


def _explain(cursors: BlockCursors, *arguments: Any) -> str | None:
    """Return why the kernels do not support these cursors, or None."""
    return explain_tensors([("history_len", cursors.history_len)], INTEGERS)


def _commit_on_cpu(
    cursors: Written[BlockCursors], blocks: Tensor, num_committed: Tensor, ring_capacity: int,
    most_unmarked: int, padding: int,
) -> None:  # fmt: skip
    """See `commit_blocks`."""
    is_live = blocks > padding
    at, n = blocks[is_live].long(), num_committed[is_live].int()
    start, length, marks = (part[at] for part in cursors)
    moved = torch.where((marks != 0) & (n > 0), length, 0)
    length = torch.where(marks != 0, 0, length) + n
    cursors.ring_start[at] = (start + moved) & (ring_capacity - 1)
    cursors.history_len[at] = length
    cursors.is_fold[at] = (length > most_unmarked).to(torch.int8)


def _reset_on_cpu(
    cursors: Written[BlockCursors], blocks: Tensor, is_reset: Tensor, most_unmarked: int,
    padding: int,
) -> None:  # fmt: skip
    """See `reset_blocks`."""
    at = blocks[(blocks > padding) & (is_reset != 0)].long()
    cursors.ring_start.index_fill_(0, at, 0)
    cursors.history_len.index_fill_(0, at, 0)
    cursors.is_fold.index_fill_(0, at, int(most_unmarked < 0))


def _commit_on_gpu(
    cursors: BlockCursors, blocks: Tensor, num_committed: Tensor, ring_capacity: int,
    most_unmarked: int, padding: int,
) -> None:  # fmt: skip
    """Launch `triton_block_cursors.commit_blocks_kernel`."""
    from hybridspec.ops.ring.triton_block_cursors import commit_blocks_kernel

    if blocks.shape[0] == 0:
        return
    with torch.cuda.device_of(blocks):
        commit_blocks_kernel[(-(-blocks.shape[0] // _BLOCK),)](
            *cursors, blocks, num_committed, blocks.stride(0), num_committed.stride(0), padding,
            blocks.shape[0], most_unmarked, RING=ring_capacity, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


def _reset_on_gpu(
    cursors: BlockCursors, blocks: Tensor, is_reset: Tensor, most_unmarked: int, padding: int
) -> None:
    """Launch `triton_block_cursors.reset_blocks_kernel`."""
    from hybridspec.ops.ring.triton_block_cursors import reset_blocks_kernel

    if blocks.shape[0] == 0:
        return
    if is_reset.dtype == torch.bool:
        is_reset = is_reset.view(torch.int8)
    with torch.cuda.device_of(blocks):
        reset_blocks_kernel[(-(-blocks.shape[0] // _BLOCK),)](
            *cursors, blocks, is_reset, blocks.stride(0), is_reset.stride(0), padding,
            blocks.shape[0], most_unmarked, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


_commit_blocks = register_kernel(
    "ring.commit_blocks", _explain, _commit_on_gpu, _commit_on_cpu, _check_commit
)
_reset_blocks = register_kernel(
    "ring.reset_blocks", _explain, _reset_on_gpu, _reset_on_cpu, _check_reset
)
