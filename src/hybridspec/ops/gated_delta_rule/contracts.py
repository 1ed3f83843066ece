"""What a correct call looks like: sizes, dtypes and strides of all arguments.

Each check is a handful of comparisons, since it runs for every layer of every step; only a call
that fails them is looked at again, argument by argument, to say what is wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._checks import (
    Dims,
    check,
    check_devices,
    check_dtype,
    check_last_stride,
    check_option,
    dtype_name,
)
from hybridspec.ops.gated_delta_rule.int8_state import GROUP_SIZE, SCALE_DTYPE
from hybridspec.ops.ring.contracts import check_marks
from hybridspec.ops.ring.view import RingView, check_ring, check_ring_shapes, ring_tensors

__all__ = ["check_is_fold", "check_options", "check_pools", "check_rows", "check_state"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDE = (torch.float32, torch.float64)


def check_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    ring: RingView,
    cu_seqlens: Tensor,
    slots: Tensor,
    out: Tensor | None,
    state_scale: Tensor | None = None,
) -> None:
    """Raise ValueError or TypeError unless the arguments of verify or prefill fit together."""
    _check_row_shapes(q, k, v, a, b, A_log, dt_bias, state, ring, cu_seqlens, slots, out)
    dtype = v.dtype
    is_right = (
        dtype in FLOATS
        and q.dtype == dtype
        and k.dtype == dtype
        and a.dtype in FLOATS
        and b.dtype in FLOATS
        and A_log.dtype in FLOATS
        and dt_bias.dtype in FLOATS
        and cu_seqlens.dtype == torch.int32
        and slots.dtype == torch.int32
        and (out is None or out.dtype in FLOATS)
    )
    if not is_right:
        check_dtype("v", v, *FLOATS)
        for name, tensor in (("q", q), ("k", k)):
            check_dtype(name, tensor, dtype)
        for name, tensor in (("a", a), ("b", b), ("A_log", A_log), ("dt_bias", dt_bias)):
            check_dtype(name, tensor, *FLOATS)
        for name, tensor in (("cu_seqlens", cu_seqlens), ("slots", slots)):
            check_dtype(name, tensor, torch.int32)
        if out is not None:
            check_dtype("out", out, *FLOATS)
    is_right = (
        q.stride(2) == k.stride(2) == v.stride(2) == a.stride(1) == b.stride(1) == 1
        and (out is None or out.stride(2) == 1)
        and A_log.is_contiguous()
        and dt_bias.is_contiguous()
        and cu_seqlens.is_contiguous()
        and slots.is_contiguous()
    )
    if not is_right:
        for name, part in (
            ("q", q), ("k", k), ("v", v), ("a", a), ("b", b), ("A_log", A_log),
            ("dt_bias", dt_bias), ("cu_seqlens", cu_seqlens), ("slots", slots),
        ):  # fmt: skip
            check_last_stride(name, part)
        if out is not None:
            check_last_stride("out", out)
    check_state(state, state_scale)
    check_ring(ring)
    if not v.is_cpu:  # a kernel that gets the address of another device takes the process down
        check_devices(
            v=v, q=q, k=k, a=a, b=b, A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens,
            slots=slots, out=out, state=state, state_scale=state_scale, **ring_tensors(ring),
        )  # fmt: skip


def check_state(state: Tensor, state_scale: Tensor | None) -> None:
    """Raise unless a pool [S, HV, V, K] has a known dtype, and factors exactly if it is int8."""
    check_last_stride("state", state)
    if state.dtype in FLOATS and state_scale is None:
        return
    if state_scale is None:
        check_dtype("state", state, *FLOATS, torch.int8)
        raise TypeError(
            f"state_scale: expected a tensor [S, HV, V, K / {GROUP_SIZE}] with an int8 state, "
            f"got None"
        )
    if state.dtype != torch.int8:
        name = dtype_name(state.dtype)
        raise TypeError(f"state_scale: expected None with a state of {name}, got a tensor")
    slots, heads, value_dim, key_dim = state.shape
    if key_dim % GROUP_SIZE:
        raise ValueError(
            f"state: expected K to be a multiple of {GROUP_SIZE} with int8, got {key_dim}"
        )
    shape = {"S": slots, "HV": heads, "V": value_dim, f"K/{GROUP_SIZE}": key_dim // GROUP_SIZE}
    check("state_scale", state_scale, " ".join(shape), shape)
    check_dtype("state_scale", state_scale, SCALE_DTYPE)
    check_last_stride("state_scale", state_scale)


def _check_row_shapes(q, k, v, a, b, A_log, dt_bias, state, ring, cu_seqlens, slots, out) -> None:
    try:
        (num_rows, heads, key_dim), (_, value_heads, value_dim) = k.shape, v.shape
        num_slots, _, capacity, _ = ring.k.shape
        gate_shape, head_shape = (num_rows, value_heads), (value_heads,)
        is_right = (
            q.shape == k.shape
            and v.shape[0] == num_rows
            and a.shape == gate_shape
            and b.shape == gate_shape
            and A_log.shape == head_shape
            and dt_bias.shape == head_shape
            and state.shape == (num_slots, value_heads, value_dim, key_dim)
            and ring.k.shape[1] == heads
            and ring.k.shape[3] == key_dim
            and ring.u.shape == (num_slots, value_heads, capacity, value_dim)
            and ring.cum_log_decay.shape == (num_slots, value_heads, capacity)
            and (out is None or out.shape == v.shape)
            and slots.ndim == 1
            and cu_seqlens.shape == (slots.shape[0] + 1,)
            and value_heads % heads == 0
        )
    except (AttributeError, ValueError, IndexError):
        is_right = False
    if is_right:
        return
    dims: Dims = {}
    check("k", k, "N H K", dims)
    check("q", q, "N H K", dims)
    check("v", v, "N HV V", dims)
    if dims["HV"] % dims["H"]:
        raise ValueError(f"v: expected a multiple of k's {dims['H']} heads, got {dims['HV']}")
    check("a", a, "N HV", dims)
    check("b", b, "N HV", dims)
    check("A_log", A_log, "HV", dims)
    check("dt_bias", dt_bias, "HV", dims)
    check("state", state, "S HV V K", dims)
    check_ring_shapes(ring, dims)
    check("slots", slots, "B", dims)
    dims["B+1"] = dims["B"] + 1
    check("cu_seqlens", cu_seqlens, "B+1", dims)
    if out is not None:
        check("out", out, "N HV V", dims)


def check_pools(
    state: Tensor,
    ring: RingView,
    num_cursors: int | None = None,
    state_scale: Tensor | None = None,
) -> None:
    """Raise ValueError or TypeError unless a state pool and a ring belong together.

    Args:
        state: the state pool.
        ring: the ring.
        num_cursors: how many cursors there are; None: one per slot.
        state_scale: factors of an int8 state.
    """
    dims: Dims = {}
    check("state", state, "S HV V K", dims)
    check_state(state, state_scale)
    check_ring_shapes(ring, dims, num_cursors)
    if dims["HV"] % dims["H"]:
        raise ValueError(
            f"state: expected a multiple of ring.k's {dims['H']} heads, got {dims['HV']}"
        )
    check_ring(ring, num_cursors)
    check_devices(state=state, state_scale=state_scale, **ring_tensors(ring))


def check_options(scale: float | None, use_qk_l2norm: bool, beta_scale: float) -> None:
    """Raise TypeError unless the options of verify and prefill are of the right kind."""
    if scale is not None:
        check_option("scale", scale, float)
    check_option("use_qk_l2norm", use_qk_l2norm, bool)
    check_option("beta_scale", beta_scale, float)


def check_is_fold(is_fold: Tensor, slots: Tensor) -> None:
    """Raise unless the marks of a verify call belong to its requests."""
    is_right = (
        isinstance(is_fold, Tensor)
        and is_fold.shape == slots.shape
        and is_fold.dtype == torch.int8
        and is_fold.is_contiguous()
    )
    if not is_right:
        check_marks({"B": slots.shape[0]}, is_fold=is_fold)
    if not slots.is_cpu:
        check_devices(slots=slots, is_fold=is_fold)
