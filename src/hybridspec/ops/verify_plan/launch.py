"""Launches of the Triton kernels, which are imported then, so that this module needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops._triton_support import explain_tensors, round_up_to_power_of_two
from hybridspec.ops.verify_plan.call import Cursors, Drafts, Entries
from hybridspec.ops.verify_plan.sampling_columns import SamplingColumns
from hybridspec.ops.verify_plan.step import Step, Workspace

__all__ = [
    "LaunchConfig",
    "build_params",
    "compact_groups",
    "compact_hidden",
    "compact_sampling",
    "copy_page_table",
    "explain",
    "explain_columns",
    "explain_drafts",
    "explain_tokens",
    "launch_config",
    "plan_step",
    "select_rows",
]

# Products and sums must round as PyTorch does: no fused multiply-add.
_EXACT = {"enable_fp_fusion": False}
_BLOCK_COLUMNS = 1024
_BLOCK_GROUPS = 1024
_BLOCK_KEYS = 1024
_MOST_DRAFTS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How a plan is computed.

    Attributes:
        is_fused: one launch for selection and building.
        is_one_block: selection in one block, rather than in seven launches of many.
        select_warps: warps of the block that selects.
    """

    is_fused: bool
    is_one_block: bool
    select_warps: int


def launch_config(num_requests: int, num_drafts: int) -> LaunchConfig:
    """Choose the launches for a batch of this size: the fastest on an H200 with Triton 3.6."""
    num_rows = num_requests * (num_drafts + 1)
    is_one_block = num_requests <= 4096
    return LaunchConfig(
        is_fused=is_one_block and num_rows <= 2048,
        is_one_block=is_one_block,
        select_warps=4 if num_requests <= 256 else 8 if num_requests <= 2048 else 16,
    )


def explain(anchor: Tensor, *others: object) -> str | None:
    """Return why the kernels do not support a call on the device of a tensor, or None."""
    return explain_tensors([("the first tensor", anchor)], (anchor.dtype,))


def explain_drafts(drafts: Drafts, *others: object) -> str | None:
    """Return why the kernels do not support a call with these drafts, or None."""
    return _explain_number(drafts.confidences.shape[1]) or explain(drafts.confidences)


def explain_tokens(token_ids: Tensor, *others: object) -> str | None:
    """Return why the kernels do not support a call with these tokens, or None."""
    return _explain_number(token_ids.shape[1] - 1) or explain(token_ids)


def explain_columns(columns: SamplingColumns, *others: object) -> str | None:
    """Return why the kernels do not support a call with these columns, or None."""
    return explain(columns.temperature)


def _explain_number(num_drafts: int) -> str | None:
    if num_drafts > _MOST_DRAFTS:
        return f"expected at most {_MOST_DRAFTS} drafts a request, got {num_drafts}"
    return None


def _ceil_div(size: int, block: int) -> int:
    return -(-size // block)


def _block(size: int, least: int = 16) -> int:
    return max(least, round_up_to_power_of_two(size))


def select_rows(
    drafts: Drafts,
    slots: Tensor,
    num_rows: int,
    cu_seqlens: Tensor,
    workspace: Tensor,
    config: LaunchConfig | None = None,
) -> None:
    """Write the offsets of the chosen rows; see api.py."""
    from hybridspec.ops.verify_plan import triton_select

    confidences = drafts.confidences
    num_requests, k = confidences.shape
    out_requests = cu_seqlens.shape[0] - 1
    config = config or launch_config(num_requests, k)
    optional, switches = _optional(drafts, slots)
    with torch.cuda.device_of(slots):
        if config.is_one_block:
            triton_select.select_kernel[(1,)](
                confidences, slots, *optional, cu_seqlens, num_requests, out_requests, num_rows,
                confidences.stride(0), **switches, BLOCK=_block(out_requests),
                num_warps=config.select_warps, **_EXACT,
            )  # fmt: skip
        else:
            _select_large(drafts, slots, num_rows, cu_seqlens, workspace)


def _optional(drafts: Drafts, slots: Tensor) -> tuple[tuple[Tensor, Tensor], dict[str, int]]:
    """Return what drafts may lack, and the switches that say so and how many there are."""
    confidences, num_drafts, calibration = drafts
    # Pointers that a switch leaves unread still need a tensor.
    limits = slots if num_drafts is None else num_drafts
    table = slots if calibration is None else calibration
    return (limits, table), {
        "NUM_DRAFTS": confidences.shape[1],
        "TABLE_BINS": 0 if calibration is None else calibration.shape[1],
        "HAS_NUM_DRAFTS": num_drafts is not None,
    }


def _select_large(
    drafts: Drafts, slots: Tensor, num_rows: int, cu_seqlens: Tensor, workspace: Tensor
) -> None:
    from hybridspec.ops.verify_plan import triton_select_large

    confidences = drafts.confidences
    num_requests, k = confidences.shape
    out_requests = cu_seqlens.shape[0] - 1
    optional, switches = _optional(drafts, slots)
    layout = Workspace.of(num_requests, k)
    num_bins = Workspace.NUM_BINS
    histograms = [workspace[i * num_bins :] for i in range(3)]
    live, search = workspace[layout.live :], workspace[layout.search :]
    block_sums, keys = workspace[layout.block_sums :], workspace[layout.keys :]
    num_keys = num_requests * k
    workspace[: layout.search].zero_()
    if k > 0:
        grid = (_ceil_div(num_keys, _BLOCK_KEYS),)
        triton_select_large.score_kernel[grid](
            confidences, slots, *optional, keys, histograms[0], live, num_requests,
            confidences.stride(0), **switches, BLOCK=_BLOCK_KEYS, **_EXACT,
        )  # fmt: skip
        for step in (1, 2):
            triton_select_large.refine_kernel[grid](
                keys, histograms[step - 1], live, search, histograms[step], num_keys, num_rows,
                PASS=step, BLOCK=_BLOCK_KEYS,
            )  # fmt: skip
    num_blocks = _ceil_div(num_requests, Workspace.BLOCK)
    triton_select_large.count_kernel[(num_blocks,)](
        slots, keys, histograms[2], search, block_sums, num_requests, NUM_DRAFTS=k,
        BLOCK=Workspace.BLOCK,
    )  # fmt: skip
    # Requests of the output past the batch's repeat the total, so they need programs too.
    triton_select_large.offsets_kernel[(_ceil_div(out_requests, Workspace.BLOCK),)](
        slots, keys, search, block_sums, cu_seqlens, num_requests, out_requests, num_blocks,
        NUM_DRAFTS=k, BLOCK=Workspace.BLOCK, MOST_BLOCKS=_block(num_blocks),
    )  # fmt: skip


def build_params(token_ids: Tensor, slots: Tensor, cursors: Cursors, plan: Step) -> None:
    """Fill the plan from its `cu_seqlens`; see api.py."""
    from hybridspec.ops.verify_plan import triton_build

    seq_len, history_len, ring_start, max_window = cursors
    num_requests, tokens = token_ids.shape
    out_requests, row_capacity = plan.slots.shape[0], plan.token_ids.shape[0]
    block_tokens = round_up_to_power_of_two(tokens)
    block = 256 // block_tokens
    grid = _ceil_div(out_requests, block)
    with torch.cuda.device_of(slots):
        triton_build.build_kernel[(grid,)](
            plan.cu_seqlens, token_ids, slots, seq_len, history_len, ring_start,
            plan.num_verify_tokens, plan.kv_len, plan.slots, plan.is_fold, plan.token_ids,
            plan.positions, plan.sources, num_requests, out_requests, row_capacity, max_window,
            token_ids.stride(0), TOKENS=tokens, BLOCK_TOKENS=block_tokens, BLOCK=block,
            BLOCK_ROWS=_block(_ceil_div(row_capacity, grid)), num_warps=2,
        )  # fmt: skip


def plan_step(
    drafts: Drafts,
    token_ids: Tensor,
    slots: Tensor,
    cursors: Cursors,
    num_rows: int,
    plan: Step,
    config: LaunchConfig | None = None,
) -> None:
    """Select and build, in one launch where the batch is small; see api.py."""
    from hybridspec.ops.verify_plan import triton_build

    confidences = drafts.confidences
    seq_len, history_len, ring_start, max_window = cursors
    num_requests, k = confidences.shape
    out_requests, row_capacity = plan.slots.shape[0], plan.token_ids.shape[0]
    config = config or launch_config(out_requests, k)
    if not config.is_fused:
        select_rows(drafts, slots, num_rows, plan.cu_seqlens, plan.workspace, config)
        build_params(token_ids, slots, cursors, plan)
        return
    optional, switches = _optional(drafts, slots)
    with torch.cuda.device_of(slots):
        triton_build.plan_kernel[(1,)](
            confidences, token_ids, slots, seq_len, history_len, ring_start, *optional,
            plan.cu_seqlens, plan.num_verify_tokens, plan.kv_len, plan.slots, plan.is_fold,
            plan.token_ids, plan.positions, plan.sources, num_requests, out_requests, num_rows,
            row_capacity, max_window, confidences.stride(0), token_ids.stride(0), **switches,
            BLOCK_TOKENS=round_up_to_power_of_two(k + 1), BLOCK=_block(out_requests),
            BLOCK_ROWS=1024, num_warps=config.select_warps, **_EXACT,
        )  # fmt: skip


def compact_hidden(hidden: Tensor, sources: Tensor, out: Tensor) -> None:
    """Gather rows; see api.py."""
    from hybridspec.ops.verify_plan.triton_compact import gather_rows_kernel

    strides = hidden.stride(0), out.stride(0)
    _launch_rows(gather_rows_kernel, out, hidden, sources, out, out.shape[1], *strides)


def compact_sampling(
    requests: SamplingColumns, sources: Tensor, rows_per_request: int, rows: SamplingColumns
) -> None:
    """Spread sampling parameters over rows; see api.py."""
    from hybridspec.ops.verify_plan import triton_compact

    num_rows = sources.shape[0]
    if num_rows == 0:
        return
    block = min(_block(num_rows), 256)
    with torch.cuda.device_of(sources):
        triton_compact.gather_sampling_kernel[(_ceil_div(num_rows, block),)](
            *requests.tensors(), sources, *rows.tensors(), num_rows, rows_per_request, BLOCK=block
        )


def compact_groups(
    requests: Tensor, seq_len: Tensor, marks: Tensor, hold_request: int, out: Entries
) -> None:
    """Compact the group ends of [n] rows to the front of [capacity] entries; see entries.py."""
    from hybridspec.ops.verify_plan import triton_compact

    num_rows, capacity = marks.shape[0], out.request.shape[0]
    if capacity == 0:
        return
    grid = max(_ceil_div(max(num_rows, capacity), _BLOCK_GROUPS), 1)
    with torch.cuda.device_of(marks):
        if grid == 1:
            counts = marks
        else:
            counts = torch.empty(grid, dtype=torch.int32, device=marks.device)
            triton_compact.count_groups_kernel[(grid,)](
                marks, counts, num_rows, BLOCK=_BLOCK_GROUPS
            )
        triton_compact.compact_groups_kernel[(grid,)](
            requests, seq_len, marks, counts, *out, num_rows, grid, capacity, hold_request,
            IS_ONE_BLOCK=grid == 1, BLOCK=_BLOCK_GROUPS, MOST_BLOCKS=_block(grid),
        )  # fmt: skip


def copy_page_table(page_table: Tensor, source: Tensor, requests: Tensor) -> None:
    """page_table[i] = source[requests[i], :width]; see entries.py."""
    from hybridspec.ops.verify_plan.triton_compact import copy_page_table_kernel

    strides = *source.stride(), *page_table.stride()
    width = page_table.shape[1]
    _launch_rows(copy_page_table_kernel, page_table, source, requests, page_table, width, *strides)


def _launch_rows(kernel: Any, out: Tensor, *arguments: Any) -> None:
    """Launch programs for pieces of the rows of `out`."""
    num_rows, width = out.shape
    if out.numel() == 0:
        return
    block = min(_block(width), _BLOCK_COLUMNS)
    with torch.cuda.device_of(out):
        kernel[(num_rows, _ceil_div(width, block))](*arguments, BLOCK=block)
