"""Launches of the Triton kernels, which are imported then, so that this module needs no Triton."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from hybridspec.ops._checks import dtype_name, row_alignment
from hybridspec.ops._requests import Batch
from hybridspec.ops._triton_support import (
    INTEGERS,
    capability,
    explain_tensors,
    round_up_to_power_of_two,
)
from hybridspec.ops.paged_attention.call import Pages, Rows

__all__ = [
    "LaunchConfig",
    "choose_launch",
    "explain_call",
    "explain_verify",
    "positive_scale",
    "verify",
    "verify_bytes",
]

_MAX_TOKENS = 16
_MAX_REQUESTS = 4096
_FEWEST_REQUESTS = 64  # smaller batches share a compiled kernel
_MANY_REQUESTS = 64  # which are short, as a rule
_LOG2_E = math.log2(math.e)
_SMALLEST_SCALE = 1e-30  # masked scores are -inf, which times zero is NaN
_HAS_WARP_GROUPS = (9, 10)
_SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))  # 99 KiB a multiprocessor
# Programs of the second launch are small, so that most find room beside those of the first.
_PIECE = 1024  # elements that one adds up at once
FINISH_WARPS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Sizes of one launch.

    Attributes:
        block_m: query rows (row of the request times head of the group) of a tile.
        block_n: keys of a unit of work.
        columns: columns of keys and values that are loaded and multiplied at once, at most.
        num_stages: depth of the copy pipeline (blocks in flight + 1).
        num_warps: warps of a program.
        num_programs: programs that share the units.
        finish_programs: programs of the second launch for each part of a tile.
        is_overlapped: whether the second launch starts while the first one runs.
    """

    block_m: int
    block_n: int
    columns: int
    num_stages: int
    num_warps: int
    num_programs: int
    finish_programs: int
    is_overlapped: bool


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """Constants that the two kernels are compiled for."""

    split: dict[str, int | bool]
    finish: dict[str, int | bool]


def kernel_sizes(
    config: LaunchConfig,
    num_requests: int,
    max_tokens: int,
    num_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
) -> KernelSizes:
    """Derive the constants of both kernels from a launch configuration and the call's shapes."""
    common = {
        "HEADS": num_heads,
        "GROUP": group,
        "D": head_dim,
        "PAGE_SIZE": page_size,
        "PROGRAMS": config.num_programs,
        "HEAD_GROUPS": math.gcd(num_heads, config.num_programs),
        "REQUESTS": max(round_up_to_power_of_two(num_requests), _FEWEST_REQUESTS),
        "BLOCK_M": config.block_m,
        "IS_OVERLAPPED": config.is_overlapped,
    }
    block_d = round_up_to_power_of_two(head_dim)
    # As many parts as a tile has where all requests are equally long; right for any number.
    parts = round_up_to_power_of_two(config.num_programs // (num_requests * num_heads) + 2)
    parts = min(max(parts, _PIECE // (16 * block_d), 4), _PIECE // 32)
    return KernelSizes(
        split=common
        | {
            "ROW_TILES": -(-max_tokens * group // config.block_m),
            "BLOCK_N": config.block_n,
            "COLUMNS": min(head_dim & -head_dim, config.columns),
            "STAGES": config.num_stages,
        },
        finish=common
        | {
            "BLOCK_D": block_d,
            "PARTS": parts,
            "PART_ROWS": max(_PIECE // parts // block_d, 1),
            "PART_COLUMNS": min(_PIECE // parts, block_d),
            "BLOCK_HEADS": round_up_to_power_of_two(num_heads),
            "BLOCK_QUERY_HEADS": round_up_to_power_of_two(num_heads * group),
        },
    )


@functools.cache
def choose_launch(
    target: tuple[int, int],
    num_processors: int,
    num_requests: int,
    num_query_rows: int,
    head_dim: int,
    itemsize: int,
) -> LaunchConfig:
    """Pick sizes; tuned on an H200 with Triton 3.6.

    Args:
        target: compute capability of the device.
        num_processors: its multiprocessors.
        num_requests: B.
        num_query_rows: most rows of a request times query heads of a key head.
        head_dim: D.
        itemsize: bytes of an element of keys and values.
    """
    # 64 rows are one instruction of a warp group; elsewhere they would not fit into registers.
    has_warp_groups = target[0] in _HAS_WARP_GROUPS and itemsize == 2
    largest_m = 64 if has_warp_groups else 32
    block_m = min(max(round_up_to_power_of_two(num_query_rows), 16), largest_m)
    block_n, num_stages = 64 if itemsize == 2 else 16, 3
    if block_m == 64 and head_dim > 128:  # as many bytes in flight, with more registers to spare
        block_n, num_stages = 32, 4
    per_processor = 2 if head_dim <= (96 if block_m == 64 else 128) else 1
    if num_requests >= _MANY_REQUESTS and per_processor == 1 and block_m <= 32 and has_warp_groups:
        block_n, per_processor = 32, 2  # one begins while the other one waits
    if target in _SMALL_SHARED_MEMORY:
        block_n, per_processor = min(block_n, 32), 1
    return LaunchConfig(
        block_m=block_m,
        block_n=block_n,
        columns=64,
        num_stages=num_stages,
        num_warps=4,
        num_programs=num_processors * per_processor,
        finish_programs=max(block_m * round_up_to_power_of_two(head_dim) // _PIECE, 1),
        is_overlapped=target >= (9, 0),
    )


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # of Triton's interpreter: few, so that small batches are cut too
    return torch.cuda.get_device_properties(device).multi_processor_count


def explain_call(
    rows: Rows, pages: Pages, batch: Batch, like_q: tuple[str, ...] = ("k_pages", "v_pages")
) -> str | None:
    """Return why no Triton kernel supports a call, or None; `like_q` have q's dtype."""
    q, k, v, out, _ = rows
    floats = {"q": q, "k": k, "v": v, "k_pages": pages.k, "v_pages": pages.v, "out": out}
    integers = [
        ("page_table", pages.table), ("seq_len", pages.seq_len), ("cu_seqlens", batch.cu_seqlens),
        ("slots", batch.slots),
    ]  # fmt: skip
    reason = explain_tensors(list(floats.items())) or explain_tensors(integers, INTEGERS)
    if reason is not None:
        return reason
    for name in like_q:
        if floats[name].dtype != q.dtype:
            kinds = dtype_name(floats[name].dtype), dtype_name(q.dtype)
            return f"{name} has dtype {kinds[0]}, q has {kinds[1]}; the kernel takes one dtype"
    if pages.k.stride() != pages.v.stride():
        return f"v_pages has strides {pages.v.stride()}, k_pages has {pages.k.stride()}"
    if out.stride(2) != 1:
        return f"out has strides {out.stride()}, the kernel needs a last stride of 1"
    return None


def explain_verify(rows: Rows, pages: Pages, batch: Batch) -> str | None:
    """Return why the Triton kernels do not support a verify call, or None."""
    reason = explain_call(rows, pages, batch, ("k", "v", "k_pages", "v_pages"))
    if reason is not None:
        return reason
    if batch.max_rows > _MAX_TOKENS:
        return f"max_verify_tokens is {batch.max_rows}, the kernel takes up to {_MAX_TOKENS}"
    if batch.slots.shape[0] > _MAX_REQUESTS:
        return f"slots: {batch.slots.shape[0]} requests, the kernel takes up to {_MAX_REQUESTS}"
    return None


def positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Return queries and the factor of their scores in base 2, above zero.

    The kernels take the largest score times the factor for the largest product.
    """
    if scale < 0:
        q, scale = -q, -scale
    return q, max(scale * _LOG2_E, _SMALLEST_SCALE)


def verify(rows: Rows, pages: Pages, batch: Batch, *, config: LaunchConfig | None = None) -> None:
    """Launch the verify kernels; `config` overrides the choice."""
    from hybridspec.ops.paged_attention.triton_verify import finish_kernel, split_kernel

    q, k, v, out, _ = rows
    k_pages, v_pages, page_table, seq_len = pages
    cu_seqlens, slots, max_rows = batch
    scale = rows.score_scale()
    (num_rows, num_query_heads, head_dim), num_requests = q.shape, slots.shape[0]
    num_heads = k.shape[1]
    if num_rows == 0 or num_requests == 0:
        out.zero_()
        return
    group = num_query_heads // num_heads
    if config is None:
        config = choose_launch(
            capability(q), _num_processors(q.device), num_requests, max_rows * group,
            head_dim, q.element_size(),
        )  # fmt: skip
    programs, block_m = config.num_programs, config.block_m
    parts = q.new_empty(2, programs, block_m, head_dim, dtype=torch.float32)
    sums = q.new_empty(2, programs, 2, block_m, dtype=torch.float32)
    cuts = q.new_empty(2, programs, 8, dtype=torch.int32)
    sizes = kernel_sizes(
        config, num_requests, max_rows, num_heads, group, head_dim, k_pages.shape[1]
    )
    q, scale_log2 = positive_scale(q, scale)
    metadata = (page_table, seq_len, cu_seqlens, slots, num_requests)
    strides = (
        k.stride()[:2], v.stride()[:2], k_pages.stride()[:3], out.stride()[:2],
        *page_table.stride(),
    )  # fmt: skip
    with torch.cuda.device_of(q):
        split_kernel[(programs,)](
            q, k, v, k_pages, v_pages, out, parts, sums, cuts, *metadata, scale_log2,
            q.stride()[:2], *strides,
            **sizes.split,
            ALIGNMENT=row_alignment(k, v, k_pages, v_pages),
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )  # fmt: skip
        finish_kernel[(config.finish_programs, 2 * programs)](
            k, v, parts, sums, cuts, k_pages, v_pages, out, *metadata, num_rows, *strides,
            **sizes.finish,
            num_warps=FINISH_WARPS,
            enable_fp_fusion=True,
            **({"launch_pdl": True} if config.is_overlapped else {}),
        )  # fmt: skip


def verify_bytes(
    positions: list[int],
    num_tokens: list[int],
    *,
    num_query_heads: int,
    num_heads: int,
    head_dim: int,
    itemsize: int,
) -> int:
    """Count the bytes that one verify step must move: keys and values, rows in, rows out, appended.

    Args:
        positions: positions stored before the step, of each request that has rows.
        num_tokens: its new rows.
        num_query_heads: Hq.
        num_heads: Hkv.
        head_dim: D.
        itemsize: bytes of an element.
    """
    old = 2 * num_heads * sum(positions)
    new = (2 * num_query_heads + 4 * num_heads) * sum(num_tokens)
    return (old + new) * head_dim * itemsize
