"""Launches of the Triton kernels: which kernels, how many programs, how many warps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import triton_build, triton_compact, triton_select, triton_select_large
from .step import Step, Workspace
from .views import SamplingColumns

__all__ = [
    "LaunchConfig",
    "build_params",
    "compact_groups",
    "compact_hidden",
    "compact_sampling",
    "copy_page_table",
    "is_interpreted",
    "launch_config",
    "plan_step",
    "select_rows",
]

# Products and sums must round as PyTorch does: no fused multiply-add.
_EXACT = {"enable_fp_fusion": False}
_BLOCK_COLUMNS = 1024
_BLOCK_GROUPS = 1024
_BLOCK_KEYS = 1024


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


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device's tensors."""
    return bool(triton.knobs.runtime.interpret)


def _block(size: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(size))


def select_rows(
    confidences: Tensor,
    slots: Tensor,
    num_rows: int,
    num_drafts: Tensor | None,
    calibration: Tensor | None,
    cu_seqlens: Tensor,
    workspace: Tensor,
    config: LaunchConfig | None = None,
) -> None:
    """Write the offsets of the chosen rows; see api.py."""
    num_requests, k = confidences.shape
    out_requests = cu_seqlens.shape[0] - 1
    config = config or launch_config(num_requests, k)
    # Pointers that a switch leaves unread still need a tensor.
    limits = slots if num_drafts is None else num_drafts
    table = slots if calibration is None else calibration
    bins = 0 if calibration is None else calibration.shape[1]
    with torch.cuda.device_of(slots):
        if config.is_one_block:
            triton_select.select_kernel[(1,)](
                confidences, slots, limits, table, cu_seqlens, num_requests, out_requests, num_rows,
                confidences.stride(0), NUM_DRAFTS=k, NUM_BINS=bins,
                HAS_NUM_DRAFTS=num_drafts is not None, BLOCK=_block(out_requests),
                num_warps=config.select_warps, **_EXACT,
            )  # fmt: skip
        else:
            _select_large(
                confidences, slots, num_rows, num_drafts, calibration, cu_seqlens, workspace
            )


def _select_large(
    confidences: Tensor,
    slots: Tensor,
    num_rows: int,
    num_drafts: Tensor | None,
    calibration: Tensor | None,
    cu_seqlens: Tensor,
    workspace: Tensor,
) -> None:
    num_requests, k = confidences.shape
    out_requests = cu_seqlens.shape[0] - 1
    layout = Workspace.of(num_requests, k)
    num_bins = Workspace.NUM_BINS
    histograms = [workspace[i * num_bins :] for i in range(3)]
    live, search = workspace[layout.live :], workspace[layout.search :]
    block_sums, keys = workspace[layout.block_sums :], workspace[layout.keys :]
    num_keys = num_requests * k
    workspace[: layout.search].zero_()
    if k > 0:
        grid = (triton.cdiv(num_keys, _BLOCK_KEYS),)
        triton_select_large.score_kernel[grid](
            confidences, slots, slots if num_drafts is None else num_drafts,
            slots if calibration is None else calibration, keys, histograms[0], live, num_requests,
            confidences.stride(0), NUM_DRAFTS=k,
            TABLE_BINS=0 if calibration is None else calibration.shape[1],
            HAS_NUM_DRAFTS=num_drafts is not None, BLOCK=_BLOCK_KEYS, **_EXACT,
        )  # fmt: skip
        for step in (1, 2):
            triton_select_large.refine_kernel[grid](
                keys, histograms[step - 1], live, search, histograms[step], num_keys, num_rows,
                PASS=step, BLOCK=_BLOCK_KEYS,
            )  # fmt: skip
    num_blocks = triton.cdiv(num_requests, Workspace.BLOCK)
    triton_select_large.count_kernel[(num_blocks,)](
        slots, keys, histograms[2], search, block_sums, num_requests, NUM_DRAFTS=k,
        BLOCK=Workspace.BLOCK,
    )  # fmt: skip
    # Requests of the output past the batch's repeat the total, so they need programs too.
    triton_select_large.offsets_kernel[(triton.cdiv(out_requests, Workspace.BLOCK),)](
        slots, keys, search, block_sums, cu_seqlens, num_requests, out_requests, num_blocks,
        NUM_DRAFTS=k, BLOCK=Workspace.BLOCK, MOST_BLOCKS=_block(num_blocks),
    )  # fmt: skip


def build_params(
    token_ids: Tensor,
    slots: Tensor,
    seq_len: Tensor,
    history_len: Tensor,
    ring_start: Tensor | None,
    max_window: int,
    plan: Step,
) -> None:
    """Fill the plan from its `cu_seqlens`; see api.py."""
    num_requests, tokens = token_ids.shape
    out_requests, row_capacity = plan.slots.shape[0], plan.token_ids.shape[0]
    block_tokens = triton.next_power_of_2(tokens)
    block = 256 // block_tokens
    grid = triton.cdiv(out_requests, block)
    with torch.cuda.device_of(slots):
        triton_build.build_kernel[(grid,)](
            plan.cu_seqlens, token_ids, slots, seq_len, history_len, ring_start,
            plan.num_verify_tokens, plan.kv_len, plan.slots, plan.is_fold, plan.token_ids,
            plan.positions, plan.sources, num_requests, out_requests, row_capacity, max_window,
            token_ids.stride(0), TOKENS=tokens, BLOCK_TOKENS=block_tokens, BLOCK=block,
            BLOCK_ROWS=_block(triton.cdiv(row_capacity, grid)), num_warps=2,
        )  # fmt: skip


def plan_step(
    confidences: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    seq_len: Tensor,
    history_len: Tensor,
    ring_start: Tensor | None,
    num_rows: int,
    num_drafts: Tensor | None,
    calibration: Tensor | None,
    max_window: int,
    plan: Step,
    config: LaunchConfig | None = None,
) -> None:
    """Select and build, in one launch where the batch is small; see api.py."""
    num_requests, k = confidences.shape
    out_requests, row_capacity = plan.slots.shape[0], plan.token_ids.shape[0]
    config = config or launch_config(out_requests, k)
    if not config.is_fused:
        select_rows(
            confidences, slots, num_rows, num_drafts, calibration, plan.cu_seqlens, plan.workspace,
            config,
        )  # fmt: skip
        build_params(token_ids, slots, seq_len, history_len, ring_start, max_window, plan)
        return
    with torch.cuda.device_of(slots):
        triton_build.plan_kernel[(1,)](
            confidences, token_ids, slots, seq_len, history_len, ring_start,
            slots if num_drafts is None else num_drafts,
            slots if calibration is None else calibration, plan.cu_seqlens, plan.num_verify_tokens,
            plan.kv_len, plan.slots, plan.is_fold, plan.token_ids, plan.positions, plan.sources,
            num_requests, out_requests, num_rows, row_capacity, max_window, confidences.stride(0),
            token_ids.stride(0), NUM_DRAFTS=k,
            NUM_BINS=0 if calibration is None else calibration.shape[1],
            HAS_NUM_DRAFTS=num_drafts is not None, BLOCK_TOKENS=triton.next_power_of_2(k + 1),
            BLOCK=_block(out_requests), BLOCK_ROWS=1024, num_warps=config.select_warps, **_EXACT,
        )  # fmt: skip


def compact_hidden(hidden: Tensor, sources: Tensor, out: Tensor) -> None:
    """Gather rows; see api.py."""
    num_rows, width = out.shape
    if out.numel() == 0:
        return
    block = min(_block(width), _BLOCK_COLUMNS)
    with torch.cuda.device_of(out):
        triton_compact.gather_rows_kernel[(num_rows, triton.cdiv(width, block))](
            hidden, sources, out, width, hidden.stride(0), out.stride(0), BLOCK=block
        )


def compact_sampling(
    requests: SamplingColumns, sources: Tensor, rows_per_request: int, rows: SamplingColumns
) -> None:
    """Spread sampling parameters over rows; see api.py."""
    num_rows = sources.shape[0]
    if num_rows == 0:
        return
    block = min(_block(num_rows), 256)
    with torch.cuda.device_of(sources):
        triton_compact.gather_sampling_kernel[(triton.cdiv(num_rows, block),)](
            *requests.tensors(), sources, *rows.tensors(), num_rows, rows_per_request, BLOCK=block
        )


def compact_groups(
    requests: Tensor,
    seq_len: Tensor,
    marks: Tensor,
    hold_request: int,
    out: list[Tensor],
) -> None:
    """Compact the group ends of [n] rows to the front of [capacity] entries; see groups.py."""
    num_rows, capacity = marks.shape[0], out[0].shape[0]
    if capacity == 0:
        return
    grid = max(triton.cdiv(max(num_rows, capacity), _BLOCK_GROUPS), 1)
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
    """page_table[i] = source[requests[i], :width]; see groups.py."""
    num_rows, width = page_table.shape
    if page_table.numel() == 0:
        return
    block = min(_block(width), _BLOCK_COLUMNS)
    with torch.cuda.device_of(page_table):
        triton_compact.copy_page_table_kernel[(num_rows, triton.cdiv(width, block))](
            source, requests, page_table, width, *source.stride(), *page_table.stride(),
            BLOCK=block,
        )  # fmt: skip
