"""ReplaySSM's gated delta rule for vLLM, for CPU and CUDA tensors.

Follows Johnny-Liou/ReplaySSM, a fork of vLLM, at commit a84849410ab56cc2b23432969eb2ecfc42a13d9c,
folder vllm/model_executor/layers/fla/ops: names, order, defaults, shapes and meaning of five
functions. No code was taken. What differs: an fp32 state stays fp32 when it is folded (there it is
rounded to the dtype of the rows on the way); all blocks of a step run in one launch; output rows
behind the last request become zero. The decay of each token is read and appended by the op as it
lies in `g_cache`; nothing is converted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.compat._calls import CallerError, renamed
from hybridspec.compat._packed import NAMES, split_heads
from hybridspec.compat.vllm_decode import (
    fused_recurrent_gated_delta_rule_packed_decode,
    fused_recurrent_gated_delta_rule_replayssm,
)
from hybridspec.ops.gated_delta_rule import verify_blocks
from hybridspec.ops.ring import RingView, commit_blocks, reset_blocks

__all__ = [
    "CallerError",
    "commit_gdn_replayssm_spec",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_recurrent_gated_delta_rule_replayssm",
    "gdn_replayssm_spec_decode",
    "reset_gdn_replayssm_spec_cursors",
]

_MODES = ("both", "verify", "flush")
_SPEC_NAMES = NAMES | {"state": "checkpoint_state", "blocks": "ssm_state_indices"}


def gdn_replayssm_spec_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    checkpoint_state: Tensor, d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, out: Tensor,
    query_start_loc: Tensor, ssm_state_indices: Tensor, write_pos: Tensor, cache_base: Tensor,
    is_flush: Tensor, max_cache_len: int, max_spec_len: int, scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True, null_block_id: int = 0, launch_mode: str = "both",
) -> Tensor:  # fmt: skip
    """Verify the rows of each request, append them to its ring, and fold marked windows.

    The window of a block is its ring rows (cache_base + j) mod R, j < write_pos; rows of the
    request go behind it. Where is_flush is set the window is also added to the checkpoint (the
    equation: `hybridspec.ops.gated_delta_rule.fold`), also if the request has no rows. Cursors and
    marks stay; `commit_gdn_replayssm_spec` moves them. Outputs:
    `hybridspec.ops.gated_delta_rule.verify`.

    Args:
        mixed_qkv: q, k and v side by side, [N, 2HK + HV V], packed by request; last stride 1; in.
        a: decay inputs, [N, HV]; last stride 1; in.
        b: write strength inputs, [N, HV]; last stride 1; in.
        A_log: [HV], any float dtype; in.
        dt_bias: [HV], any float dtype; in.
        checkpoint_state: [blocks, HV, V, K]; last stride 1, so a slice of a page will do; in-out.
        d_cache: corrected values, [blocks, HV, R, V], R a power of two; likewise; in-out.
        k_cache: normalised keys, [blocks, H, R, K]; likewise; in-out.
        g_cache: log-decay of each token, [blocks, HV, R], fp32; likewise; in-out.
        out: where to write, [N, HV, V]; last stride 1; out.
        query_start_loc: row bounds of the requests, [B+1], int32 or int64; in.
        ssm_state_indices: block of each request, [B], int32 or int64; any stride; in.
        write_pos: rows of each window, [blocks], int32; in.
        cache_base: first row of each window, [blocks], int32; in.
        is_flush: which windows to fold, [blocks], int8; in.
        max_cache_len: most rows of a window and a step together; R may be larger.
        max_spec_len: most rows of one request.
        scale: factor of the outputs; None is K^-0.5.
        use_qk_l2norm_in_kernel: whether q and k are first scaled to length one per head.
        null_block_id: blocks up to this number are padding; -1 or more.
        launch_mode: "both"; "verify" serves only blocks that are not marked, and padding, "flush"
            only blocks that are, and both leave outputs of all other rows as they are.

    Returns:
        `out`, zeros in rows of padding.

    Raises:
        CallerError: for a wrong call; it is a ValueError.

    Numerics:
        As `hybridspec.ops.gated_delta_rule.verify`.

    Source:
        The repository and commit that the module names.
    """
    if launch_mode not in _MODES:
        raise CallerError(f"launch_mode: expected one of {_MODES}, got {launch_mode!r}")
    q, k, v = split_heads(mixed_qkv, checkpoint_state, "checkpoint_state")
    window = _most_rows(d_cache, max_cache_len, max_spec_len)
    with torch.no_grad(), renamed(_SPEC_NAMES):
        bounds = query_start_loc.to(torch.int32).contiguous()
        blocks = ssm_state_indices.to(torch.int32)
        target, marks = out, is_flush.to(torch.int8)
        is_written = None
        if launch_mode != "both":
            blocks, is_served = _served(blocks, marks, null_block_id, launch_mode)
            is_written = _rows_of(is_served, bounds, out.shape[0])
            target = torch.empty_like(out)
        verify_blocks(
            q,
            k,
            v,
            a,
            b,
            A_log,
            dt_bias,
            checkpoint_state,
            RingView(k_cache, d_cache, g_cache, cache_base, write_pos, window, True),
            bounds,
            blocks,
            max_verify_tokens=max_spec_len,
            is_fold=marks,
            padding=null_block_id,
            scale=scale,
            use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
            out=target,
        )
        if is_written is not None:
            out.copy_(torch.where(is_written, target, out))
    return out


def commit_gdn_replayssm_spec(
    write_pos: Tensor, cache_base: Tensor, is_flush: Tensor, num_accepted: Tensor,
    state_batch_indices: Tensor, max_cache_len: int, max_spec_len: int,
    cache_buf_len: int | None = None, null_block_id: int = 0,
) -> None:  # fmt: skip
    """Move the cursors of a step over its accepted rows, and mark blocks for the next step.

    Once per step, after all layers. The equation: `hybridspec.ops.ring.commit_blocks`; the next
    step folds windows with write_pos + 2 max_spec_len > max_cache_len. Blocks that no request names
    keep their cursors.

    Args:
        write_pos: rows of each window, [blocks], int32; in-out.
        cache_base: first row of each window, [blocks], int32; in-out.
        is_flush: marks of this step, then of the next, [blocks], int8; in-out.
        num_accepted: accepted rows of each request, the bonus token's included, [B], int32 or
            int64; any stride; in.
        state_batch_indices: block of each request, [B], int32 or int64; any stride; in.
        max_cache_len: most rows of a window and a step together.
        max_spec_len: most rows of one request.
        cache_buf_len: ring rows, a power of two; None is the least that is not below
            `max_cache_len`.
        null_block_id: blocks up to this number are padding; -1 or more.

    Raises:
        CallerError: for a wrong call; it is a ValueError.

    Numerics:
        Integers only; no host sync.

    Source:
        The repository and commit that the module names.
    """
    if cache_buf_len is None:
        cache_buf_len = 1 << (max_cache_len - 1).bit_length()
    with renamed(NAMES):
        commit_blocks(
            cache_base, write_pos, is_flush, state_batch_indices, num_accepted,
            ring_capacity=cache_buf_len, most_unmarked=max_cache_len - 2 * max_spec_len,
            padding=null_block_id,
        )  # fmt: skip


def reset_gdn_replayssm_spec_cursors(
    write_pos: Tensor, cache_base: Tensor, is_flush: Tensor, do_reset: Tensor,
    state_batch_indices: Tensor, max_cache_len: int, max_spec_len: int, null_block_id: int = 0,
) -> None:  # fmt: skip
    """Empty the windows of requests that have just finished their prompt.

    write_pos = cache_base = 0 and is_flush = 2 max_spec_len > max_cache_len, where do_reset.
    Arguments, errors and numerics as in `commit_gdn_replayssm_spec`, but for:

    Args:
        is_flush: marks of the next step, [blocks], int8; in-out.
        do_reset: which requests, [B], bool or an integer; any stride; in.
    """
    with renamed(NAMES):
        reset_blocks(
            cache_base, write_pos, is_flush, state_batch_indices, do_reset,
            most_unmarked=max_cache_len - 2 * max_spec_len, padding=null_block_id,
        )  # fmt: skip


def _most_rows(d_cache: Tensor, max_cache_len: int, max_spec_len: int) -> int:
    """Return the rows of the longest window that a step may meet."""
    if not isinstance(d_cache, Tensor) or d_cache.dim() != 4:
        raise CallerError("d_cache: expected a tensor [blocks, HV, R, V]")
    # Where even empty windows are marked, they grow to the rows of one step.
    window = max(max_cache_len - max_spec_len, max_spec_len)
    needed, ring_rows = window + max_spec_len, d_cache.shape[2]
    if needed > ring_rows:
        raise CallerError(
            f"max_cache_len: windows of {window} rows and {max_spec_len} more need {needed} ring "
            f"rows, got {ring_rows}"
        )
    return window


def _served(
    blocks: Tensor, marks: Tensor, null_block: int, launch_mode: str
) -> tuple[Tensor, Tensor]:
    """Return blocks with those that a launch leaves out as padding, and whose outputs it writes."""
    is_marked = marks[blocks.clamp(min=0).long()] != 0
    is_padding = blocks <= null_block
    is_served = is_marked & ~is_padding if launch_mode == "flush" else ~is_marked | is_padding
    return torch.where(is_served, blocks, null_block), is_served


def _rows_of(is_served: Tensor, bounds: Tensor, num_rows: int) -> Tensor:
    """Return which rows belong to requests that are served, [N, 1, 1]."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=bounds.device)
    request = torch.bucketize(rows, bounds[1:], right=True)
    with_nobody = torch.nn.functional.pad(is_served, (0, 1))
    return with_nobody[request].view(-1, 1, 1)
