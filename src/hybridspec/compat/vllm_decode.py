"""vLLM's gated delta rule for one token per request, with a cache of corrections and without one.

Follows Johnny-Liou/ReplaySSM (vLLM with ReplaySSM) at commit
a84849410ab56cc2b23432969eb2ecfc42a13d9c, folder vllm/model_executor/layers/fla/ops; see `vllm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.compat._calls import CallerError, renamed
from hybridspec.compat._packed import NAMES, split_heads
from hybridspec.ops.gated_delta_rule import decode, materialize_rows, verify_rows

__all__ = [
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_recurrent_gated_delta_rule_replayssm",
]

_STATE = {"state": "initial_state"}


def fused_recurrent_gated_delta_rule_replayssm(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
    initial_state: Tensor, d_cache: Tensor, k_cache: Tensor, g_cache: Tensor, out: Tensor,
    ssm_state_indices: Tensor, write_pos: Tensor, use_qk_l2norm_in_kernel: bool = False,
    block_v: int | None = None, num_warps: int | None = None, num_stages: int | None = None,
    nk: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run one token per request behind the rows of its cache, and append it.

    The window of request b is the rows 0..write_pos[b]-1 of its block; nothing wraps around, and
    cursors stay. The token goes into row write_pos[b]. Where that is the last row of the cache, all
    rows, this one included, are also added to the state (the equation:
    `hybridspec.ops.gated_delta_rule.fold`), and the caller starts again at 0.

    Args:
        mixed_qkv: q, k and v side by side, [B, 2HK + HV V]; last stride 1; in.
        a: decay inputs, [B, HV]; last stride 1; in.
        b: write strength inputs, [B, HV]; last stride 1; in.
        A_log: [HV], any float dtype; in.
        dt_bias: [HV], any float dtype; in.
        scale: factor of the outputs.
        initial_state: states, [blocks, HV, V, K]; in-out.
        d_cache: corrected values, [blocks, HV, L, V]; in-out.
        k_cache: normalised keys, [blocks, H, L, K]; in-out.
        g_cache: log-decay of each token, [blocks, HV, L], fp32; in-out.
        out: where to write, [B, 1, HV, V]; out.
        ssm_state_indices: block of each request, 0 or less = padding, [B], int32 or int64; any
            stride; in.
        write_pos: rows of each window, 0..L-1, [B], int32; in.
        use_qk_l2norm_in_kernel: whether q and k are first scaled to length one per head.
        block_v: ignored, as the next three: the op chooses its launch.
        num_warps: ignored.
        num_stages: ignored.
        nk: ignored.

    Returns:
        `out`, zeros in rows of padding, and `initial_state`.

    Raises:
        CallerError: for a wrong call; it is a ValueError.

    Numerics:
        As `hybridspec.ops.gated_delta_rule.verify`. The write strength is not rounded to the dtype
        of `b`; the token that fills the cache is added to the state as the cache holds it.

    Source:
        The repository and commit that the module names.
    """
    q, k, v = split_heads(mixed_qkv, initial_state, "initial_state")
    if not isinstance(d_cache, Tensor) or d_cache.dim() != 4:
        raise CallerError("d_cache: expected a tensor [blocks, HV, L, V]")
    length = d_cache.shape[2]
    with torch.no_grad(), renamed(NAMES | _STATE):
        blocks = ssm_state_indices.to(torch.int32).contiguous()
        verify_rows(
            q.unsqueeze(1),
            k.unsqueeze(1),
            v.unsqueeze(1),
            a.unsqueeze(1),
            b.unsqueeze(1),
            A_log,
            dt_bias,
            initial_state,
            k_cache,
            d_cache,
            g_cache,
            write_pos,
            slots=blocks,
            max_window=length - 1,
            scale=scale,
            use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
            out=out,
            has_token_decay=True,
            padding=0,
            zeroes_padding=True,
        )
        is_full = (write_pos == length - 1) & (blocks > 0)
        materialize_rows(
            initial_state, k_cache, d_cache, g_cache, blocks, blocks, None,
            torch.where(is_full, length, -1).to(torch.int32), max_window=length,
            has_token_decay=True,
        )  # fmt: skip
    return out, initial_state


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
    initial_state: Tensor, out: Tensor, ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run one token per request and advance its state, in place.

    The equation: `hybridspec.ops.gated_delta_rule.decode`. Arguments, result and errors as in
    `fused_recurrent_gated_delta_rule_replayssm`, but for:

    Args:
        out: where to write, [B, 1, HV, V]; last stride 1; out.

    Numerics:
        As `hybridspec.ops.gated_delta_rule.decode`. The write strength is not rounded to the dtype
        of `b`.

    Source:
        The repository and commit that the module names.
    """
    rows = split_heads(mixed_qkv, initial_state, "initial_state")
    if not isinstance(out, Tensor) or out.dim() != 4 or out.shape[1] != 1:
        raise CallerError("out: expected a tensor [B, 1, HV, V]")
    with torch.no_grad(), renamed(NAMES | _STATE):
        decode(
            *rows, a, b, A_log, dt_bias, initial_state, ssm_state_indices.to(torch.int32),
            padding=0, scale=scale, use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
            out=out.squeeze(1),
        )  # fmt: skip
    return out, initial_state
