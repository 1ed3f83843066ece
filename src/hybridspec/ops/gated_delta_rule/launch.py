"""How the Triton kernels are launched: support, tile sizes, operand types, arguments.

Kernels are imported inside the functions that launch them, so this module imports without Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops._triton_support import (
    CPU_CAPABILITY,
    capability,
    compiler_version,
    explain_tensors,
    round_up_to_power_of_two,
)
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.int8_state import GROUP_SIZE, SCALE_DTYPE
from hybridspec.ops.ring.view import RingView

__all__ = [
    "EXACT",
    "LaunchConfig",
    "Operands",
    "choose_operands",
    "choose_verify_launch",
    "explain_advance",
    "explain_verify",
    "fold",
    "materialize",
    "triton_dtype",
    "verify",
    "verify_bytes",
]

_MAX_HEAD_DIM = 256
_MAX_TOKENS = 16
_CACHE_LINE_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Tile sizes of one launch of the verify kernel.

    Attributes:
        block_k: key columns per matrix product; divides K.
        block_v: value rows of the state per loop iteration; divides V.
        splits: programs that share the value rows of one head.
        num_stages: depth of the copy pipeline (tiles in flight + 1).
        num_warps: warps per program; every warp repeats the small system.
        max_registers: cap per thread, or None.
        prefetch_lines: cache lines of the state asked for before the small system is solved.
    """

    block_k: int
    block_v: int
    splits: int
    num_stages: int
    num_warps: int
    max_registers: int | None
    prefetch_lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Types in which matrix products read their operands; they all accumulate in fp32.

    Attributes:
        act: products of new rows with each other and of coefficients with new values.
        state: products with the state.
        ring: products with ring rows.
        precision: of products of fp32 operands: "ieee", or "tf32" if activations have 16 bits.
    """

    act: torch.dtype
    state: torch.dtype
    ring: torch.dtype
    precision: str


EXACT = Operands(act=torch.float32, state=torch.float32, ring=torch.float32, precision="ieee")


def choose_operands(rows: Tensor, state: Tensor, ring: RingView) -> Operands:
    """Pick operand types: those of the tensors, or fp32 throughout for fp32 activations.

    Triton's interpreter has no products of bf16, so what it runs on a CPU is fp32 too.
    """
    if rows.dtype == torch.float32 or not rows.is_cuda:
        return EXACT
    return Operands(act=rows.dtype, state=state.dtype, ring=ring.k.dtype, precision="tf32")


def choose_verify_launch(
    target: tuple[int, int], compiler: str | None, num_heads: int, key_dim: int, value_dim: int,
    num_tokens: int, operands: Operands,
) -> LaunchConfig:  # fmt: skip
    """Pick tile sizes for verify; tuned on an H200 with Triton 3.6, 2026-11-30.

    Args:
        target: compute capability of the device.
        compiler: Triton version.
        num_heads: requests times value heads.
        key_dim: K.
        value_dim: V.
        num_tokens: rows of one request that the kernel is built for, 8 or 16.
        operands: operand types.
    """
    is_wide = torch.float32 in (operands.state, operands.ring)
    num_large = (key_dim > 128) + (num_tokens > 8)
    # Measured there: registers for 12 programs on a multiprocessor. Other compilers would spill.
    is_tuned = target == (9, 0) and (compiler or "").startswith("3.6.") and num_large == 0
    num_warps, block_k, num_stages, max_registers = 1 << num_large, 64, 3, None
    if operands.act == torch.float32:
        num_warps, block_k = (8 if num_large else 4), 32
    elif num_large == 2 or (is_wide and num_large):
        num_warps, block_k, num_stages = 8, 64 * num_large, 2
    elif operands.ring == torch.float32:
        num_warps, block_k, num_stages = (1, 32, 2) if is_tuned else (2, 32, 3)
    else:
        block_k = 32 if is_wide else 64
        max_registers = 168 if is_tuned else None
    splits = 2 if num_heads <= 132 and value_dim % 32 == 0 else 1
    tile_bytes = 16 * key_dim * operands.state.itemsize
    has_cache = target != CPU_CAPABILITY and value_dim >= 32 * splits
    lines = min(2 * tile_bytes // _CACHE_LINE_BYTES, 64) if has_cache else 0
    return LaunchConfig(
        block_k=min(_largest_divisor_power(key_dim), block_k),
        block_v=16,
        splits=splits,
        num_stages=num_stages,
        num_warps=num_warps,
        max_registers=max_registers,
        prefetch_lines=1 << (lines.bit_length() - 1) if lines else 0,
    )


def _largest_divisor_power(size: int) -> int:
    return size & -size


def explain_verify(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> str | None:
    """Return why the Triton kernel does not support a verify call, or None."""
    reason = explain_tensors(
        [
            ("q", rows.q),
            ("a", rows.a),
            ("b", rows.b),
            ("state", state.values),
            ("ring.k", ring.k),
            ("ring.u", ring.u),
            ("out", rows.out),
        ]
    )
    if reason is None and batch.max_rows > _MAX_TOKENS:
        reason = f"max_verify_tokens is {batch.max_rows}, the kernel takes up to {_MAX_TOKENS}"
    return reason or _explain_pools(state.values, ring)


def explain_advance(state: State, ring: RingView, *marks: object) -> str | None:
    """Return why the Triton kernel does not support a fold or materialize call, or None."""
    reason = explain_tensors([("state", state.values), ("ring.k", ring.k), ("ring.u", ring.u)])
    return reason or _explain_pools(state.values, ring)


def _explain_pools(state: Tensor, ring: RingView) -> str | None:
    for name, size in (("K", state.shape[3]), ("V", state.shape[2])):
        if size % 16 or size > _MAX_HEAD_DIM:
            return f"{name} is {size}, the kernel takes multiples of 16 up to {_MAX_HEAD_DIM}"
    if ring.k.dtype != ring.u.dtype:
        return f"ring.k has dtype {ring.k.dtype}, ring.u has {ring.u.dtype}"
    if ring.cum_log_decay.dtype != torch.float32 or ring.cum_log_decay.stride(2) != 1:
        return "ring.cum_log_decay is not fp32 with a last stride of 1"
    for name, stride in (("k", ring.k.stride(2)), ("u", ring.u.stride(2))):
        if stride * ring.k.shape[2] >= 2**31:
            return f"ring.{name} has a row stride of {stride}"
    return None


def triton_dtype(dtype: torch.dtype):
    """Return Triton's name of a dtype."""
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[
        dtype
    ]


def verify(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch, *,
    operands: Operands | None = None, config: LaunchConfig | None = None,
) -> None:  # fmt: skip
    """Launch the verify kernel; options override the choice."""
    from hybridspec.ops.gated_delta_rule.triton_verify import verify_kernel

    q, k, v, a, b, out = rows
    checkpoints = state.values
    _, value_heads, value_dim, key_dim = checkpoints.shape
    num_requests = batch.num_requests(ring)
    if num_requests == 0:
        out.zero_()
        return
    is_by_row = batch.cu_seqlens is None
    num_tokens = 8 if batch.max_rows <= 8 else _MAX_TOKENS
    operands = operands or choose_operands(q, checkpoints, ring)
    config = config or choose_verify_launch(
        capability(q), compiler_version(), num_requests * value_heads, key_dim, value_dim,
        num_tokens, operands,
    )  # fmt: skip
    if batch.rand_seed is not None:  # the generator takes registers
        config = replace(config, num_warps=max(2, config.num_warps), max_registers=None)
    options = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    with torch.cuda.device_of(q):
        verify_kernel[(num_requests * value_heads * config.splits,)](
            q, k, v, a, b, gates.A_log, gates.dt_bias, checkpoints, ring.k, ring.u,
            ring.cum_log_decay, out, ring.ring_start, ring.history_len, batch.cu_seqlens,
            batch.slots, batch.is_fold, batch.rand_seed, batch.fold_threshold,
            q.shape[0] // num_requests if is_by_row else None,
            q.shape[0], num_requests, gates.output_scale(key_dim), gates.beta_scale,
            batch.padding, 1 if batch.slots is None else batch.slots.stride(0),
            q.stride()[:2], k.stride()[:2], v.stride()[:2], (a.stride(0), b.stride(0)),
            checkpoints.stride()[:3], ring.k.stride()[:3], ring.u.stride()[:3],
            ring.cum_log_decay.stride()[:2], out.stride()[:2],
            H=k.shape[1], HV=value_heads, K=key_dim, V=value_dim,
            RING=round_up_to_power_of_two(ring.k.shape[2]),
            WINDOW=max(16, round_up_to_power_of_two(ring.max_window)),
            TOKENS=num_tokens,
            BLOCK_K=config.block_k,
            BLOCK_V=config.block_v,
            BLOCK_OUT=round_up_to_power_of_two(value_dim),
            SPLITS=config.splits,
            STAGES=config.num_stages,
            ACT_OPERAND=triton_dtype(operands.act),
            STATE_OPERAND=triton_dtype(operands.state),
            RING_OPERAND=triton_dtype(operands.ring),
            PRECISION=operands.precision,
            PREFETCH=config.prefetch_lines,
            USE_L2NORM=gates.use_qk_l2norm,
            BY_ROW=is_by_row,
            ZERO_PADDING=not batch.keeps_padding,
            FOLD_BY_SLOT=batch.is_fold_by_slot,
            TOKEN_DECAY=ring.has_token_decay,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
            **options,
        )  # fmt: skip


def fold(state: State, ring: RingView, slots: Tensor, is_fold: Tensor) -> None:
    """Launch the kernel that advances checkpoints over all live rows of marked requests."""
    _advance(state.values, ring, slots, slots, is_fold, is_flag=True)


def materialize(
    state: State, ring: RingView, slots: Tensor, out_slots: Tensor, num_rows: Tensor
) -> None:
    """Launch the kernel that writes states after some live rows."""
    _advance(state.values, ring, slots, out_slots, num_rows, is_flag=False)


def _advance(
    state: Tensor, ring: RingView, slots: Tensor, out_slots: Tensor, num_rows: Tensor, is_flag: bool
) -> None:
    from hybridspec.ops.gated_delta_rule.triton_fold import advance_kernel

    num_requests, (_, value_heads, value_dim, _) = slots.shape[0], state.shape
    if num_requests == 0:
        return
    operands = choose_operands(ring.k, state, ring)
    with torch.cuda.device_of(state):
        advance_kernel[(num_requests * value_heads * (value_dim // 16),)](
            state, ring.k, ring.u, ring.cum_log_decay, ring.ring_start, ring.history_len,
            slots, out_slots, num_rows, *advance_strides(state, ring),
            **advance_sizes(state, ring, operands),
            BLOCK_V=16,
            IS_FLAG=is_flag,
            num_warps=4 if operands.ring == torch.float32 else 1,
            enable_fp_fusion=True,
        )  # fmt: skip


def advance_strides(state: Tensor, ring: RingView) -> list[tuple[int, ...]]:
    """Return the strides that the kernels which advance states take."""
    inner = [pool.stride()[:3] for pool in (state, ring.k, ring.u)]
    return [*inner, ring.cum_log_decay.stride()[:2]]


def advance_sizes(state: Tensor, ring: RingView, operands: Operands) -> dict[str, Any]:
    """Return the constants of the kernels which advance states, by name."""
    _, value_heads, value_dim, key_dim = state.shape
    return {
        "H": ring.k.shape[1],
        "HV": value_heads,
        "K": key_dim,
        "V": value_dim,
        "RING": round_up_to_power_of_two(ring.k.shape[2]),
        "WINDOW": max(16, round_up_to_power_of_two(ring.max_window)),
        "BLOCK_K": min(_largest_divisor_power(key_dim), 64),
        "OPERAND": triton_dtype(operands.ring),
        "PRECISION": operands.precision,
        "TOKEN_DECAY": ring.has_token_decay,
    }


def verify_bytes(
    history_lens: list[int], num_tokens: list[int], is_fold: list[bool], *,
    num_heads: int, num_value_heads: int, key_dim: int, value_dim: int, act: torch.dtype,
    state: torch.dtype, ring: torch.dtype,
) -> int:  # fmt: skip
    """Count the bytes that one verify step must move: each input read once, each output written.

    Args:
        history_lens: live rows of each request.
        num_tokens: new rows of each request.
        is_fold: whether each request folds.
        num_heads: H.
        num_value_heads: HV.
        key_dim: K.
        value_dim: V.
        act: dtype of q, k, v, a, b and the outputs.
        state: dtype of the state.
        ring: dtype of ring rows k and u.
    """
    keys, values = num_heads * key_dim, num_value_heads * value_dim
    state_bytes = values * key_dim * state.itemsize
    if state == torch.int8:
        state_bytes += values * key_dim // GROUP_SIZE * SCALE_DTYPE.itemsize
    row_bytes = (keys + values) * ring.itemsize + 4 * num_value_heads
    new_bytes = (2 * keys + 2 * values + 2 * num_value_heads) * act.itemsize + row_bytes
    total = 0
    for live, new, fold in zip(history_lens, num_tokens, is_fold, strict=True):
        total += state_bytes * (2 if fold else 1) + live * row_bytes + new * new_bytes
    return total
