"""Which rows a step verifies, and its plan: checks, allocation, op calls."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._checks import FLOATS, Dims, check, check_dtype, check_option, check_tensor
from hybridspec.ops._library import register_kernel
from hybridspec.ops.verify_plan import cpu, launch
from hybridspec.ops.verify_plan.call import Cursors, Drafts
from hybridspec.ops.verify_plan.step import Step, Workspace

__all__ = [
    "build_params",
    "plan_step",
    "select_rows",
    "survival_scores",
]


def survival_scores(confidences: Tensor, calibration: Tensor | None = None) -> Tensor:
    """Estimate the probability that each draft and all before it are accepted; nothing is modified.

        c_j     = confidences[:, j], NaN and negative values as 0, values above 1 as 1
        c_j     = calibration[j, min(floor(c_j M), M - 1)], made safe in the same way, if given
        score_j = c_1 c_2 ... c_j, multiplied in this order; below 2^-126 it is 0

    Args:
        confidences: the drafter's probability of each draft, [B, k], floating; in.
        calibration: observed acceptance by draft and confidence bin, [k, M], fp32; in.

    Returns:
        Scores [B, k], fp32, in 0..1, never rising along a row.

    Raises:
        ValueError, TypeError: if a shape or dtype is wrong.

    Numerics:
        fp32, one rounding per multiplication; the same bits on every backend.

    Source:
        Histogram binning: Zadrozny and Elkan, Obtaining calibrated probability estimates (2001).
    """
    dims: Dims = {}
    check("confidences", confidences, "B k", dims)
    check_dtype("confidences", confidences, *FLOATS)
    _check_calibration(calibration, dims)
    return cpu.survival_scores(confidences, calibration)


def select_rows(
    confidences: Tensor, slots: Tensor, *,
    num_rows: int, num_drafts: Tensor | None = None, calibration: Tensor | None = None,
    out: Tensor | None = None, workspace: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Choose which rows a step verifies: the best `num_rows` of the batch; inputs stay as they are.

    Row 0 of each live request (slot >= 0) is always in. The rest of the budget goes to the drafts
    with the highest `survival_scores`, equal scores in the order request, then draft. Scores never
    rise along a request, so its chosen rows are its first ones, and lengths describe the choice.

    Args:
        confidences: [B, k], floating, any row stride; in.
        slots: [B], int32, -1 = padding; in.
        num_rows: row budget, at least B.
        num_drafts: drafts that each request may verify, [B], int32; None: all k; in.
        calibration: [k, M], fp32, see `survival_scores`; in.
        out: offsets of the requests, [C+1], int32, C >= B; out, entries past B repeat the total.
        workspace: scratch for the kernels, int32, see `Step`; scratch.
        backend: "auto", "triton" or "reference".

    Returns:
        `out`, or a new [B+1] tensor: cu_seqlens of the chosen rows.

    Raises:
        ValueError, TypeError: if a shape, dtype or the budget is wrong.
        UnsupportedError: if the backend does not support the call.

    Numerics:
        Integers and `survival_scores`: the same bits in every run and on every backend.
    """
    drafts = Drafts(confidences, num_drafts, calibration)
    dims: Dims = {}
    if out is None or workspace is None:
        _check_drafts(drafts, slots, num_rows, dims)
    if out is None:
        out = torch.empty(dims["B"] + 1, dtype=torch.int32, device=slots.device)
    if workspace is None:
        size = Workspace.of(dims["B"], dims["k"]).size
        workspace = torch.empty(size, dtype=torch.int32, device=slots.device)
    _select_rows(drafts, slots, num_rows, out, workspace, backend=backend)
    return out


def build_params(
    token_ids: Tensor, slots: Tensor, seq_len: Tensor, history_len: Tensor, *,
    plan: Step, ring_start: Tensor | None = None, max_window: int = 16, backend: str = "auto",
) -> Step:  # fmt: skip
    """Fill a plan from its `cu_seqlens`, which the caller or `select_rows` has written.

        n_b        = cu_seqlens[b+1] - cu_seqlens[b], or 0 where slots[b] = -1
        kv_len     = seq_len[slot] + n_b
        is_fold    = n_b > 0 and history_len[slot] + n_b > max_window, or as `decide_folds` of
                     `ring` says for a first window, where ring_start is given
        row j of b: token_ids[b, j] at position seq_len[slot] + j, source b (k + 1) + j

    Args:
        token_ids: the last committed token and the drafts, [B, k+1], int64; in.
        slots: [B], int32, -1 = padding; in.
        seq_len: tokens stored per slot, [S], int32; in.
        history_len: live ring rows per slot, [S], int32; in.
        plan: of at least B requests; all but `cu_seqlens` is written, rows and requests that are
            left over as padding rows; in-out.
        ring_start: first live ring row per slot, [S], int32; given: folds are staggered; in.
        max_window: most live ring rows W.
        backend: "auto", "triton" or "reference".

    Returns:
        `plan`.

    Raises:
        ValueError, TypeError: if a shape or dtype is wrong.
        UnsupportedError: if the backend does not support the call.
    """
    cursors = Cursors(seq_len, history_len, ring_start, max_window)
    _build_params(token_ids, slots, cursors, plan, backend=backend)
    return plan


def plan_step(
    confidences: Tensor, token_ids: Tensor, slots: Tensor, seq_len: Tensor, history_len: Tensor, *,
    plan: Step, ring_start: Tensor | None = None, num_rows: int | None = None,
    num_drafts: Tensor | None = None, calibration: Tensor | None = None, max_window: int = 16,
    backend: str = "auto",
) -> Step:  # fmt: skip
    """Choose the rows of a step and fill the plan: `select_rows`, then `build_params`, in one call.

    Args:
        confidences: [B, k], or [B, k+1] whose last column is not looked at, floating; in.
        token_ids: the last committed token and the drafts, [B, k+1], int64; in.
        slots: [B], int32, -1 = padding; in.
        seq_len: tokens stored per slot, [S], int32; in.
        history_len: live ring rows per slot, [S], int32; in.
        plan: of at least B requests; out.
        ring_start: first live ring row per slot, [S], int32; given: folds are staggered; in.
        num_rows: row budget, B to the plan's rows; None: the plan's rows.
        num_drafts: drafts that each request may verify, [B], int32; None: all k; in.
        calibration: [k, M], fp32, see `survival_scores`; in.
        max_window: most live ring rows W.
        backend: "auto", "triton" or "reference".

    Returns:
        `plan`. No host sync and no allocation: a call can be captured in a CUDA graph.

    Raises:
        ValueError, TypeError: if a shape, dtype or the budget is wrong.
        UnsupportedError: if the backend does not support the call.
    """
    is_wide = getattr(confidences, "shape", None) == getattr(token_ids, "shape", None)
    if is_wide and isinstance(confidences, Tensor) and confidences.dim() == 2:
        confidences = confidences[:, :-1]
    drafts = Drafts(confidences, num_drafts, calibration)
    cursors = Cursors(seq_len, history_len, ring_start, max_window)
    if num_rows is None and isinstance(plan, Step):
        num_rows = plan.token_ids.shape[0]
    _plan_step(drafts, token_ids, slots, cursors, num_rows, plan, backend=backend)
    return plan


def _check_workspace(name: str, workspace: Tensor, size: int) -> None:
    check_dtype(name, workspace, torch.int32)
    if workspace.dim() != 1 or workspace.shape[0] < size:
        raise ValueError(f"{name}: expected at least [{size}], got {list(workspace.shape)}")


def _check_calibration(calibration: Tensor | None, dims: Dims) -> None:
    if calibration is None:
        return
    check("calibration", calibration, "k M", dims)
    check_dtype("calibration", calibration, torch.float32)
    if not calibration.is_contiguous() or dims["M"] < 1:
        raise ValueError(
            f"calibration: expected a contiguous [k, M] with M >= 1, got shape "
            f"{list(calibration.shape)} with strides {calibration.stride()}"
        )


def _check_drafts(drafts: Drafts, slots: Tensor, num_rows: int, dims: Dims) -> None:
    confidences, num_drafts, calibration = drafts
    check_tensor("confidences", confidences, "B k", dims, *FLOATS)
    check_tensor("slots", slots, "B", dims, torch.int32)
    if num_drafts is not None:
        check_tensor("num_drafts", num_drafts, "B", dims, torch.int32)
    _check_calibration(calibration, dims)
    check_option("num_rows", num_rows, int)
    if num_rows < dims["B"]:
        raise ValueError(
            f"num_rows: expected at least one row for each of {dims['B']} requests, got {num_rows}"
        )


def _check_select_rows(
    drafts: Drafts, slots: Tensor, num_rows: int, cu_seqlens: Tensor, workspace: Tensor
) -> None:
    dims: Dims = {}
    _check_drafts(drafts, slots, num_rows, dims)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] <= dims["B"]:
        raise ValueError(f"out: expected at least [{dims['B'] + 1}], got {list(cu_seqlens.shape)}")
    check_dtype("out", cu_seqlens, torch.int32)
    _check_workspace("workspace", workspace, Workspace.of(dims["B"], dims["k"]).size)


_select_rows = register_kernel(
    "verify_plan.select_rows",
    launch.explain_drafts,
    launch.select_rows,
    cpu.select_rows,
    _check_select_rows,
)


def _check_build_params(token_ids: Tensor, slots: Tensor, cursors: Cursors, plan: Step) -> None:
    _check_build(token_ids, slots, cursors, plan, {})


_build_params = register_kernel(
    "verify_plan.build_params",
    launch.explain_tokens,
    launch.build_params,
    cpu.build_params,
    _check_build_params,
)


def _check_plan_step(
    drafts: Drafts, token_ids: Tensor, slots: Tensor, cursors: Cursors, num_rows: int, plan: Step
) -> None:
    dims: Dims = {}
    _check_build(token_ids, slots, cursors, plan, dims)
    dims["k"] = dims["T"] - 1
    _check_drafts(drafts, slots, num_rows, dims)
    capacity = plan.token_ids.shape[0]
    if num_rows > capacity:
        raise ValueError(f"num_rows: expected at most the plan's {capacity} rows, got {num_rows}")
    _check_workspace("plan.workspace", plan.workspace, Workspace.of(dims["B"], dims["k"]).size)


_plan_step = register_kernel(
    "verify_plan.plan_step",
    launch.explain_drafts,
    launch.plan_step,
    cpu.plan_step,
    _check_plan_step,
)


def _check_build(
    token_ids: Tensor, slots: Tensor, cursors: Cursors, plan: Step, dims: Dims
) -> None:
    if not isinstance(plan, Step):
        raise TypeError(f"plan: expected a Step, got {type(plan).__name__}")
    check_option("max_window", cursors.max_window, int, low=1)
    check_tensor("token_ids", token_ids, "B T", dims, torch.int64)
    check_tensor("slots", slots, "B", dims, torch.int32)
    per_slot = {"seq_len": cursors.seq_len, "history_len": cursors.history_len}
    if cursors.ring_start is not None:
        per_slot["ring_start"] = cursors.ring_start
    for name, tensor in per_slot.items():
        check_tensor(name, tensor, "S", dims, torch.int32)
    if dims["T"] < 1:
        raise ValueError("token_ids: expected [B, k+1] with a last committed token, got [B, 0]")
    if plan.slots.shape[0] < dims["B"]:
        raise ValueError(f"plan: expected room for {dims['B']} requests, got {plan.slots.shape[0]}")
