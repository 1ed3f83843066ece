"""How the Triton kernel of the raw ring is launched; as `launch.py` for the other ring."""

from __future__ import annotations

import torch

from hybridspec.ops._triton_support import explain_tensors, round_up_to_power_of_two
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.launch import triton_dtype
from hybridspec.ops.ring.view import RawRingView

__all__ = ["choose_operand", "choose_tiles", "explain", "verify"]

_MAX_HEAD_DIM = 256
_MAX_ROWS = 16  # of window and step


def explain(
    rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch
) -> str | None:
    """Return why the Triton kernel does not support a call, or None."""
    reason = explain_tensors(
        [
            *(("q" if name == "q" else name, part) for name, part in rows._asdict().items()),
            ("state", state.values),
            *((f"ring.{name}", getattr(ring, name)) for name in ("k", "v", "a", "b")),
        ]
    )
    if reason is not None:
        return reason
    needed = ring.max_window + batch.max_rows
    if needed > _MAX_ROWS:
        return f"a window and the rows of a step are up to {needed}, the kernel takes {_MAX_ROWS}"
    for name, size in (("K", state.values.shape[3]), ("V", state.values.shape[2])):
        if size % 16 or size > _MAX_HEAD_DIM:
            return f"{name} is {size}, the kernel takes multiples of 16 up to {_MAX_HEAD_DIM}"
    for name, stride in (("k", ring.k.stride(2)), ("v", ring.v.stride(2))):
        if stride * ring.k.shape[2] >= 2**31:
            return f"ring.{name} has a row stride of {stride}"
    return None


def choose_operand(rows: Rows, state: State, ring: RawRingView) -> torch.dtype:
    """Pick the dtype of operands of products: that of the rows, or fp32.

    That of the rows has to hold the ring's and, in two numbers, the state's. Triton's interpreter
    has no products of bf16, so what it runs on a CPU is fp32.
    """
    act, stored = rows.q.dtype, state.values.dtype
    if not rows.q.is_cuda or ring.k.dtype != act or (act == torch.float16 and stored != act):
        return torch.float32
    return act


def choose_tiles(operand: torch.dtype, state: torch.dtype, key_dim: int) -> tuple[int, int, int]:
    """Return key columns of a product, warps of a program and stages of its loop."""
    columns = key_dim & -key_dim
    if operand == torch.float32:
        return min(columns, 16), 8, 1
    is_large = key_dim > 128
    return (
        min(columns, 64 if state == operand else 32),
        8 if is_large else 2,
        2 if columns >= 64 else 1,
    )


def verify(rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch) -> None:
    """Launch the kernel."""
    from hybridspec.ops.gated_delta_rule.triton_raw import verify_raw_kernel

    q, k, v, a, b, out = rows
    checkpoints = state.values
    _, value_heads, value_dim, key_dim = checkpoints.shape
    num_requests = batch.num_requests(ring)
    if num_requests == 0:
        out.zero_()
        return
    operand = choose_operand(rows, state, ring)
    block_k, num_warps, num_stages = choose_tiles(operand, checkpoints.dtype, key_dim)
    splits = 2 if num_requests * value_heads <= 132 and value_dim % 32 == 0 else 1
    has_cache = q.is_cuda and value_dim >= 32 * splits
    with torch.cuda.device_of(q):
        verify_raw_kernel[(num_requests * value_heads * splits,)](
            q, k, v, a, b, gates.A_log, gates.dt_bias, checkpoints, *ring[:4], out,
            *ring[4:6], batch.cu_seqlens, batch.slots, batch.is_fold, batch.fold_threshold,
            batch.max_rows if batch.cu_seqlens is None else None, q.shape[0], num_requests,
            gates.output_scale(key_dim), gates.beta_scale,
            q.stride()[:2], k.stride()[:2], v.stride()[:2], (a.stride(0), b.stride(0)),
            checkpoints.stride()[:3], ring.k.stride()[:3], ring.v.stride()[:3],
            ring.a.stride()[:2], ring.b.stride()[:2], out.stride()[:2],
            H=k.shape[1], HV=value_heads, K=key_dim, V=value_dim,
            RING=round_up_to_power_of_two(ring.k.shape[2]),
            BLOCK_K=block_k,
            BLOCK_V=16,
            BLOCK_OUT=round_up_to_power_of_two(value_dim),
            SPLITS=splits,
            STAGES=num_stages,
            PREFETCH=64 if has_cache else 0,
            ZERO_PADDING=not batch.keeps_padding,
            OPERAND=triton_dtype(operand),
            USE_L2NORM=gates.use_qk_l2norm,
            BY_ROW=batch.cu_seqlens is None,
            num_warps=num_warps,
            num_stages=num_stages,
            enable_fp_fusion=True,
        )  # fmt: skip
