"""Contracts of calls: sizes, dtypes, strides and devices of all arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridspec.ops._checks import (
    FLOATS,
    Dims,
    check,
    check_devices,
    check_dtype,
    check_last_stride,
    check_option,
    dtype_name,
)
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.int8_state import GROUP_SIZE, SCALE_DTYPE
from hybridspec.ops.gated_delta_rule.rounding import ROUNDED
from hybridspec.ops.ring.contracts import check_marks, check_threshold
from hybridspec.ops.ring.view import (
    RawRingView,
    RingView,
    check_raw_ring,
    check_raw_ring_shapes,
    check_ring,
    check_ring_shapes,
    check_window,
    raw_ring_tensors,
    ring_tensors,
)

__all__ = [
    "check_decode",
    "check_fold",
    "check_materialize",
    "check_pools",
    "check_prefill",
    "check_verify",
    "check_verify_raw",
    "check_verify_rows",
]


def check_verify(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> None:
    """Raise unless the arguments of `verify` fit together."""
    _check_rows("N", rows, gates, state, ring, batch)
    check_option("padding", batch.padding, int, low=-1)
    check_window(ring, batch.max_rows)
    if batch.is_fold is not None:
        assert batch.slots is not None
        marked = ring.k.shape[0] if batch.is_fold_by_slot else batch.slots.shape[0]
        check_marks({"B": marked}, is_fold=batch.is_fold)
        check_devices(slots=batch.slots, is_fold=batch.is_fold)


def check_prefill(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch, chunk_size: int
) -> None:
    """Raise unless the arguments of `prefill` fit together."""
    _check_rows("N", rows, gates, state, ring, batch)
    check_option("max_seqlen", batch.max_rows, int, low=0)
    check_option("chunk_size", chunk_size, int, low=1)


def check_verify_rows(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> None:
    """Raise unless the arguments of `verify_rows` fit together."""
    _check_rows("B T", rows, gates, state, ring, batch)
    check_option("padding", batch.padding, int, low=-1)
    if batch.fold_threshold is not None:
        check_threshold(batch.fold_threshold)
    check_window(ring, batch.max_rows)


def check_verify_raw(
    rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch
) -> None:
    """Raise unless the arguments of `verify_raw` fit together, or of `verify_raw_rows` packed."""
    dims: Dims = {}
    tensors = _check_floats("N", rows, gates, state.values, dims)
    check_raw_ring_shapes(ring, dims, "B" if batch.cu_seqlens is None else "S")
    check_raw_ring(ring, batch.max_rows)
    marks = {"slots": batch.slots, "is_fold": batch.is_fold}
    check_marks(dims, **{name: mark for name, mark in marks.items() if mark is not None})
    if batch.cu_seqlens is not None:
        if "B" not in dims:
            raise TypeError("slots: expected a tensor [B], got NoneType")
        dims["B+1"] = dims["B"] + 1
        check("cu_seqlens", batch.cu_seqlens, "B+1", dims)
        check_dtype("cu_seqlens", batch.cu_seqlens, torch.int32)
        check_last_stride("cu_seqlens", batch.cu_seqlens)
    elif batch.fold_threshold is not None:
        check_threshold(batch.fold_threshold)
    _check_options(gates)
    check_devices(
        **tensors, **raw_ring_tensors(ring),
        **{name: part for name, part in batch._asdict().items() if isinstance(part, Tensor)},
    )  # fmt: skip


def check_decode(rows: Rows, gates: Gates, state: Tensor, slots: Tensor, padding: int) -> None:
    """Raise unless the arguments of `decode` fit together."""
    dims: Dims = {}
    tensors = _check_floats("B", rows, gates, state, dims)
    check("slots", slots, "B", dims)
    check_dtype("slots", slots, torch.int32)
    check_devices(**tensors, slots=slots)
    check_option("padding", padding, int, low=-1)
    _check_options(gates)


def _check_floats(
    packing: str, rows: Rows, gates: Gates, state: Tensor, dims: Dims
) -> dict[str, Tensor]:
    """Check rows, parameters and states that are no integers; return them by name, v first."""
    by_name = rows._asdict()
    specs = {"k": "H K", "q": "H K", "v": "HV V", "a": "HV", "b": "HV", "out": "HV V"}
    for name, spec in specs.items():
        check(name, by_name[name], f"{packing} {spec}", dims)
    if dims["H"] == 0 or dims["HV"] % dims["H"]:
        raise ValueError(f"v: expected a multiple of k's {dims['H']} heads, got {dims['HV']}")
    parameters = {"A_log": gates.A_log, "dt_bias": gates.dt_bias}
    for name, parameter in parameters.items():
        check(name, parameter, "HV", dims)
    check("state", state, "S HV V K", dims)
    tensors = {"v": rows.v} | by_name | parameters | {"state": state}
    for name, tensor in tensors.items():
        check_dtype(name, tensor, *((rows.v.dtype,) if name in ("q", "k") else FLOATS))
        check_last_stride(name, tensor)
    return tensors


def check_fold(state: State, ring: RingView, slots: Tensor, is_fold: Tensor) -> None:
    """Raise unless the arguments of `fold` fit together."""
    check_pools(state, ring)
    check_marks({}, slots=slots, is_fold=is_fold)
    check_devices(state=state.values, slots=slots, is_fold=is_fold)


def check_materialize(
    state: State, ring: RingView, slots: Tensor, out_slots: Tensor, num_rows: Tensor
) -> None:
    """Raise unless the arguments of `materialize` fit together."""
    check_pools(state, ring)
    check_marks({}, slots=slots, out_slots=out_slots, num_rows=num_rows)
    check_devices(state=state.values, slots=slots, out_slots=out_slots, num_rows=num_rows)


def _check_rows(
    packing: str, rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> None:
    """Check all but the batch's own options.

    Args:
        packing: "N" for rows packed by request; "B T" for equally many of each, with cursors of
            each.
        rows: rows of the call.
        gates: parameters and options of the layer.
        state: checkpoints.
        ring: ring of the layer.
        batch: its requests.
    """
    by_name: dict[str, Any] = rows._asdict()
    dims: Dims = {}
    for name, spec in (("k", "H K"), ("q", "H K"), ("v", "HV V")):
        check(name, by_name[name], f"{packing} {spec}", dims)
    if dims["H"] == 0 or dims["HV"] % dims["H"]:
        raise ValueError(f"v: expected a multiple of k's {dims['H']} heads, got {dims['HV']}")
    check("a", rows.a, f"{packing} HV", dims)
    check("b", rows.b, f"{packing} HV", dims)
    check("A_log", gates.A_log, "HV", dims)
    check("dt_bias", gates.dt_bias, "HV", dims)
    check("state", state.values, "S HV V K", dims)
    cursors = "S" if packing == "N" else "B"
    check_ring_shapes(ring, dims, cursors)
    if packing == "N" or batch.slots is not None:
        check("slots", batch.slots, "B", dims)
    if packing == "N":
        dims["B+1"] = dims["B"] + 1
        check("cu_seqlens", batch.cu_seqlens, "B+1", dims)
    check("out", rows.out, f"{packing} HV V", dims)

    check_dtype("v", rows.v, *FLOATS)
    check_dtype("q", rows.q, rows.v.dtype)
    check_dtype("k", rows.k, rows.v.dtype)
    parameters: dict[str, Any] = {"A_log": gates.A_log, "dt_bias": gates.dt_bias}
    for name, tensor in ({"a": rows.a, "b": rows.b} | parameters).items():
        check_dtype(name, tensor, *FLOATS)
    indices: dict[str, Any] = {"cu_seqlens": batch.cu_seqlens, "slots": batch.slots}
    devices = indices | parameters
    for name, index in indices.items():
        if index is not None:
            check_dtype(name, index, torch.int32)
    check_dtype("out", rows.out, *FLOATS)
    if batch.is_fold_by_slot:  # a column of a table
        del indices["slots"]
    strided = by_name | (parameters | indices if packing == "N" else {})
    for name, part in strided.items():
        check_last_stride(name, part)
    if packing != "N":
        check_dtype("state", state.values, *FLOATS)
    _check_state(state)
    if batch.rand_seed is not None:
        _check_seed(batch.rand_seed, state.values)
        devices["rand_seed"] = batch.rand_seed
    check_ring(ring, cursors)
    check_devices(
        **{"v": rows.v} | by_name, **devices, state=state.values,
        state_scale=state.scale, **ring_tensors(ring),
    )  # fmt: skip
    _check_options(gates)


def _check_options(gates: Gates) -> None:
    if gates.scale is not None:
        check_option("scale", gates.scale, float)
    check_option("use_qk_l2norm", gates.use_qk_l2norm, bool)
    check_option("beta_scale", gates.beta_scale, float)


def _check_seed(rand_seed: Tensor, state: Tensor) -> None:
    """Raise unless folds into a state can be rounded by chance."""
    check("rand_seed", rand_seed, "1", {})
    check_dtype("rand_seed", rand_seed, torch.int64)
    if state.dtype not in ROUNDED:
        raise TypeError(
            f"rand_seed: expected None with a state of {dtype_name(state.dtype)}; only states of "
            f"16 bits are rounded by chance"
        )


def _check_state(state: State) -> None:
    """Raise unless a pool [S, HV, V, K] has a known dtype, and factors exactly if it is int8."""
    values, scale = state
    check_last_stride("state", values)
    if values.dtype in FLOATS and scale is None:
        return
    if scale is None:
        check_dtype("state", values, *FLOATS, torch.int8)
        raise TypeError(
            f"state_scale: expected a tensor [S, HV, V, K / {GROUP_SIZE}] with an int8 state, "
            f"got None"
        )
    if values.dtype != torch.int8:
        name = dtype_name(values.dtype)
        raise TypeError(f"state_scale: expected None with a state of {name}, got a tensor")
    slots, heads, value_dim, key_dim = values.shape
    if key_dim % GROUP_SIZE:
        raise ValueError(
            f"state: expected K to be a multiple of {GROUP_SIZE} with int8, got {key_dim}"
        )
    shape = {"S": slots, "HV": heads, "V": value_dim, f"K/{GROUP_SIZE}": key_dim // GROUP_SIZE}
    check("state_scale", scale, " ".join(shape), shape)
    check_dtype("state_scale", scale, SCALE_DTYPE)
    check_last_stride("state_scale", scale)


def check_pools(state: State, ring: RingView, cursors: str = "S") -> None:
    """Raise unless a state pool and a ring belong together; `cursors` as `check_ring`."""
    dims: Dims = {}
    check("state", state.values, "S HV V K", dims)
    _check_state(state)
    check_ring_shapes(ring, dims, cursors)
    if dims["H"] == 0 or dims["HV"] % dims["H"]:
        raise ValueError(
            f"state: expected a multiple of ring.k's {dims['H']} heads, got {dims['HV']}"
        )
    check_ring(ring, cursors)
    check_devices(state=state.values, state_scale=state.scale, **ring_tensors(ring))
