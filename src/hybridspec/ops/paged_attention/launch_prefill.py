"""Launch of the prompts' Triton kernel, which is imported then, so that this needs no Triton."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from hybridspec.ops._checks import row_alignment
from hybridspec.ops._requests import Batch
from hybridspec.ops._triton_support import capability
from hybridspec.ops.paged_attention.append import append_rows
from hybridspec.ops.paged_attention.call import Pages, Rows

__all__ = ["PrefillLaunch", "choose_launch", "kernel_sizes", "prefill"]

_LOG2_E = math.log2(math.e)
_SMALLEST_SCALE = 1e-30  # masked scores are -inf, which times zero is NaN
_HAS_WARP_GROUPS = (9, 10)
_COLUMNS = 64  # pieces of a row that are multiplied at once; wider ones spill registers


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLaunch:
    """Sizes of one launch.

    Attributes:
        block_m: rows of a tile.
        block_n: keys that are multiplied at once.
        num_stages: depth of the copy pipeline.
        num_warps: warps of a program.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int


@functools.cache
def choose_launch(target: tuple[int, int], head_dim: int, itemsize: int) -> PrefillLaunch:
    """Pick sizes that fit registers and shared memory; not tuned.

    They depend on nothing that varies with load, so that a row's sums do not.

    Args:
        target: compute capability of the device.
        head_dim: D.
        itemsize: bytes of an element.
    """
    if itemsize == 4:
        return PrefillLaunch(block_m=32, block_n=16, num_stages=2, num_warps=4)
    if target[0] not in _HAS_WARP_GROUPS:
        return PrefillLaunch(block_m=64, block_n=32, num_stages=2, num_warps=4)
    stages = 3 if head_dim <= 128 else 2
    return PrefillLaunch(block_m=128, block_n=64, num_stages=stages, num_warps=8)


def kernel_sizes(
    config: PrefillLaunch, num_heads: int, group: int, head_dim: int, page_size: int
) -> dict[str, int]:
    """Derive the kernel's constants from a launch configuration and the call's shapes."""
    return {
        "HEADS": num_heads,
        "GROUP": group,
        "D": head_dim,
        "PAGE_SIZE": page_size,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "COLUMNS": min(head_dim & -head_dim, _COLUMNS),
        "STAGES": config.num_stages,
    }


def prefill(rows: Rows, pages: Pages, batch: Batch, *, config: PrefillLaunch | None = None) -> None:
    """Append the rows in one launch and attend in another; `config` overrides the choice."""
    from hybridspec.ops.paged_attention.triton_prefill import prefill_kernel

    q, k, _, out, _ = rows
    k_pages, v_pages, page_table, seq_len = pages
    cu_seqlens, slots, max_rows = batch
    (num_rows, num_query_heads, head_dim), num_requests = q.shape, slots.shape[0]
    append_rows(rows, pages, batch)
    if num_rows == 0 or num_requests == 0:
        out.zero_()
        return
    if config is None:
        config = choose_launch(capability(q), head_dim, q.element_size())
    scale = rows.score_scale()
    if scale < 0:  # the kernel takes the largest score times the scale for the largest product
        q, scale = -q, -scale
    num_heads = k.shape[1]
    num_tiles = max(-(-max_rows // config.block_m), 1)
    with torch.cuda.device_of(q):
        prefill_kernel[(num_tiles * num_requests * num_query_heads,)](
            q, k_pages, v_pages, out, page_table, seq_len, cu_seqlens, slots, num_rows,
            num_requests, num_tiles, max(scale * _LOG2_E, _SMALLEST_SCALE), *q.stride()[:2],
            *k_pages.stride()[:3], *out.stride()[:2], *page_table.stride(),
            **kernel_sizes(
                config, num_heads, num_query_heads // num_heads, head_dim, k_pages.shape[1]
            ),
            ALIGNMENT=row_alignment(k_pages, v_pages),
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )  # fmt: skip
