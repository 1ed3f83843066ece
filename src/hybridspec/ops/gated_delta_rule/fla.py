"""Prefill by the chunked kernels of flash-linear-attention (package fla-core), imported when used.

Nothing is read from the device: chunks are listed there, as many as there can be. The library's
kernels try out their own configurations at first use; on Hopper they are given fixed ones, so
that what a prompt gives does not depend on which was faster that day.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops._checks import dtype_name
from hybridspec.ops._triton_support import (
    CPU_CAPABILITY,
    FLOATS,
    capability,
    explain_tensors,
    round_up_to_power_of_two,
)
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.int8_state import SCALE_DTYPE, quantise, widen
from hybridspec.ops.ring.view import RingView

__all__ = ["KERNELS", "explain", "fixed_configurations", "library", "prefill"]

_VERSION = "0.6"  # its kernels are named below, and the layout of its states has an argument
_CHUNK_SIZE = 64  # smaller ones run other kernels
_MAX_KEY_DIM = 256
_MAX_REQUESTS = 4096
_COPY_BLOCK = 1024
_LOCK = threading.Lock()

_logger = logging.getLogger("hybridspec")

# Module and name of a kernel, and what it is fixed to on Hopper: sizes, warps, stages.
KERNELS: dict[tuple[str, str], tuple[dict[str, int], int, int]] = {
    ("fla.ops.utils.cumsum", "chunk_local_cumsum_scalar_kernel"): ({}, 1, 3),
    ("fla.ops.gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_kkt_solve_kernel"): (
        {"BK": 64}, 1, 3,
    ),
    ("fla.ops.gated_delta_rule.wy_fast", "recompute_w_u_fwd_kernel"): ({}, 4, 3),
    ("fla.ops.common.chunk_delta_h", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"): (
        {"BV": 32}, 4, 3,
    ),
    ("fla.ops.common.chunk_o", "chunk_fwd_kernel_o"): ({"BK": 128, "BV": 128}, 8, 3),
}  # fmt: skip


@functools.cache
def library() -> Callable[..., Any] | str:
    """Import the library's function, or return why it cannot be used."""
    if importlib.util.find_spec("fla") is None:
        return "not installed: fla-core"
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return "fla is installed without fla-core"
    if not version.startswith(f"{_VERSION}."):
        return f"fla-core {version} is installed, needs {_VERSION}"
    try:
        with warnings.catch_warnings():  # it says what else of its own is not installed
            warnings.simplefilter("ignore", ImportWarning)
            module = importlib.import_module("fla.ops.gated_delta_rule")
    except (ImportError, OSError, RuntimeError) as error:
        return f"fla-core cannot be imported: {str(error).splitlines()[0]}"
    return module.chunk_gated_delta_rule


@functools.cache
def _tuners() -> list[tuple[Any, list[Any], list[Any]]]:
    """The library's tuners, with the one configuration that we fix and those that it tries."""
    import triton

    tuners = []
    for (module, name), (sizes, warps, stages) in KERNELS.items():
        tuner = getattr(importlib.import_module(module), name).fn
        config = triton.Config(sizes, num_warps=warps, num_stages=stages)
        tuners.append((tuner, [config], tuner.configs))
    return tuners


@contextmanager
def fixed_configurations(target: tuple[int, int]) -> Iterator[None]:
    """Let the library's kernels run as fixed here, where they are: in a call of ours only."""
    if target not in ((9, 0), CPU_CAPABILITY):
        yield
        return
    with _LOCK:
        for tuner, mine, _ in _tuners():
            tuner.configs = mine
        try:
            yield
        finally:
            for tuner, _, theirs in _tuners():
                tuner.configs = theirs


def explain(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch, chunk_size: int
) -> str | None:
    """Return why the library does not support a prefill call, or None; on a GPU warn of it once."""
    reason = _explain(rows, gates, state, batch, chunk_size)
    if reason is not None and rows.q.is_cuda:
        _warn_once(reason)
    return reason


@functools.cache
def _warn_once(reason: str) -> None:
    _logger.warning("prompts of Gated DeltaNet layers run in plain PyTorch, slowly: %s", reason)


def _explain(
    rows: Rows, gates: Gates, state: State, batch: FoldingBatch, chunk_size: int
) -> str | None:
    assert batch.slots is not None
    q, k, v, a, b, out = rows
    named = [("q", q), ("k", k), ("v", v), ("a", a), ("b", b), ("out", out)]
    named += [("A_log", gates.A_log), ("dt_bias", gates.dt_bias), ("state", state.values)]
    reason = explain_tensors(named, (*FLOATS, torch.int8))
    if reason is not None:
        return reason
    for name, tensor in named[:3]:
        if tensor.dtype not in (torch.bfloat16, torch.float16) or tensor.dtype != q.dtype:
            return (
                f"{name} has dtype {dtype_name(tensor.dtype)}; flash-linear-attention takes q, k "
                "and v in bfloat16 or float16 only"
            )
    if k.shape[2] > _MAX_KEY_DIM:
        return f"the key size is {k.shape[2]}, flash-linear-attention takes up to {_MAX_KEY_DIM}"
    if chunk_size != _CHUNK_SIZE:
        return f"chunk_size is {chunk_size}, flash-linear-attention is used with {_CHUNK_SIZE}"
    if batch.slots.shape[0] > _MAX_REQUESTS:
        return f"slots: {batch.slots.shape[0]} requests, the kernels take up to {_MAX_REQUESTS}"
    found = library()
    return found if isinstance(found, str) else None


def prefill(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch, chunk_size: int
) -> None:
    """Run prompts from their slots' states; see `hybridspec.ops.gated_delta_rule.prefill`."""
    run = library()
    assert not isinstance(run, str)
    q, out, cu_seqlens, slots = rows.q, rows.out, batch.cu_seqlens, batch.slots
    assert cu_seqlens is not None and slots is not None
    if q.shape[0] == 0 or slots.shape[0] == 0:
        out.zero_()
        return
    with torch.cuda.device_of(q):
        inputs = _prepare(rows, gates)
        chunks = _list_chunks(cu_seqlens, q.shape[0], batch.max_rows, chunk_size)
        initial = _read_states(state, cu_seqlens, slots)
        with fixed_configurations(capability(q)):
            y, final = run(
                *inputs,
                scale=gates.output_scale(q.shape[2]),
                initial_state=initial,
                output_final_state=True,
                state_v_first=True,
                # An object of its own: the library remembers what it derived from one it has seen.
                cu_seqlens=cu_seqlens.view(-1),
                chunk_indices=chunks,
                chunk_size=chunk_size,
            )
        _write_states(final, state, cu_seqlens, slots)
        _finish(y[0], out, cu_seqlens, slots)


def _prepare(rows: Rows, gates: Gates) -> tuple[Tensor, ...]:
    """Return q, k, v, log-decay and write strength as the library takes them, [1, N, ...]."""
    from hybridspec.ops.gated_delta_rule.triton_prefill import prepare_kernel

    q, k, v, a, b, _ = rows
    (num_rows, heads, key_dim), (value_heads, value_dim) = k.shape, v.shape[1:]
    outputs = (
        *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)),
        *(a.new_empty(a.shape, dtype=torch.float32) for _ in range(2)),
    )
    blocks = [round_up_to_power_of_two(n) for n in (heads, value_heads, key_dim, value_dim)]
    prepare_kernel[(num_rows,)](
        q, k, v, a, b, gates.A_log, gates.dt_bias, *outputs, gates.beta_scale, *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], a.stride(0), b.stride(0),
        H=heads,
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_H=blocks[0],
        BLOCK_HV=blocks[1],
        BLOCK_K=blocks[2],
        BLOCK_V=blocks[3],
        NORM=gates.use_qk_l2norm,
        num_warps=8 if blocks[1] * blocks[3] > 4096 or blocks[0] * blocks[2] > 4096 else 4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return tuple(part.unsqueeze(0) for part in outputs)


def _list_chunks(cu_seqlens: Tensor, num_rows: int, max_seqlen: int, chunk_size: int) -> Tensor:
    """List (request, chunk) [C, 2], C as large as it can be for so many rows."""
    from hybridspec.ops.gated_delta_rule.triton_prefill import list_chunks_kernel

    num_requests = cu_seqlens.shape[0] - 1
    num_chunks = num_rows // chunk_size + num_requests
    num_chunks = min(num_chunks, num_requests * max(-(-max_seqlen // chunk_size), 1))
    chunks = cu_seqlens.new_empty(num_chunks, 2, dtype=torch.int32)
    requests = round_up_to_power_of_two(num_requests)
    block = max(1, min(32, 4096 // requests))
    list_chunks_kernel[(-(-num_chunks // block),)](
        cu_seqlens, chunks, num_requests, num_chunks,
        CHUNK=chunk_size,
        REQUESTS=requests,
        BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return chunks


def _move(pool: Tensor, batch: Tensor, cu_seqlens: Tensor, slots: Tensor, is_store: bool) -> None:
    from hybridspec.ops.gated_delta_rule.triton_prefill import move_states_kernel

    num_requests, heads, value_dim, key_dim = batch.shape
    move_states_kernel[(num_requests * heads, -(-value_dim * key_dim // _COPY_BLOCK))](
        pool, batch, cu_seqlens, slots, *pool.stride()[:3],
        HV=heads,
        V=value_dim,
        K=key_dim,
        BLOCK=_COPY_BLOCK,
        IS_STORE=is_store,
        num_warps=4,
    )  # fmt: skip


def _read_states(state: State, cu_seqlens: Tensor, slots: Tensor) -> Tensor:
    """Return the checkpoints of the requests in fp32, [B, HV, V, K]; zeros where there is none."""
    values, scale = state
    shape = (slots.shape[0], *values.shape[1:])
    dtype = torch.float32 if scale is None else values.dtype
    states = torch.empty(shape, dtype=dtype, device=values.device)
    _move(values, states, cu_seqlens, slots, is_store=False)
    if scale is None:
        return states
    factors = scale.new_empty(shape[0], *scale.shape[1:])
    _move(scale, factors, cu_seqlens, slots, is_store=False)
    return widen(states, factors, torch.float32)


def _write_states(states: Tensor, state: State, cu_seqlens: Tensor, slots: Tensor) -> None:
    """Round fp32 states [B, HV, V, K] into the slots of the requests that have rows."""
    values, scale = state
    if scale is not None:
        factors = states.new_empty(states.shape[0], *scale.shape[1:], dtype=SCALE_DTYPE)
        integers = torch.empty(states.shape, dtype=values.dtype, device=states.device)
        quantise(states, integers, factors)
        _move(scale, factors, cu_seqlens, slots, is_store=True)
        states = integers
    _move(values, states, cu_seqlens, slots, is_store=True)


def _finish(y: Tensor, out: Tensor, cu_seqlens: Tensor, slots: Tensor) -> None:
    """Copy rows [N, HV, V]; zeros in those that belong to no slot."""
    from hybridspec.ops.gated_delta_rule.triton_prefill import finish_kernel

    num_rows, heads, value_dim = y.shape
    finish_kernel[(num_rows,)](
        y, out, cu_seqlens, slots, slots.shape[0], *out.stride()[:2],
        HV=heads,
        V=value_dim,
        REQUESTS=round_up_to_power_of_two(slots.shape[0]),
        BLOCK=min(4 * _COPY_BLOCK, round_up_to_power_of_two(heads * value_dim)),
        num_warps=4,
    )  # fmt: skip
