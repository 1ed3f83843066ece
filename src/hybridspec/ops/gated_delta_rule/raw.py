"""Verify over a raw ring: contract and calls.

The ring keeps k, v and the gate inputs as they came, and corrections are recomputed from them
whenever they are needed. So nothing is rounded between a token and the fold that takes it in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridspec.ops._backends import always
from hybridspec.ops._checks import (
    FLOATS,
    Dims,
    check,
    check_devices,
    check_dtype,
    check_last_stride,
    check_option,
)
from hybridspec.ops._library import Backend, register
from hybridspec.ops.gated_delta_rule import raw_cpu, raw_cuda, raw_launch
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State, is_packed
from hybridspec.ops.ring.contracts import check_marks, check_threshold
from hybridspec.ops.ring.raw_view import (
    RawRingView,
    check_raw_ring,
    check_raw_ring_shapes,
    raw_ring_tensors,
)

__all__ = ["RAW_BACKENDS", "explain_verify_raw", "verify_raw", "verify_raw_rows"]


def verify_raw(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state: Tensor, ring: RawRingView, cu_seqlens: Tensor, slots: Tensor, *,
    max_verify_tokens: int, is_fold: Tensor | None = None, scale: float | None = None,
    use_qk_l2norm: bool = True, beta_scale: float = 1.0, out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Run the rows to verify and append them as they are behind the live windows; cursors stay.

    The equations are those of `verify`, over the rows of the window and of the step as one: with
    c_t = g_1 + ... + g_t since the checkpoint S,

        u_t = beta_t (v_t - e^{c_t} S k_t) - sum_{s<t} beta_t e^{c_t-c_s} (k_t.k_s) u_s
        y_t = scale (e^{c_t} S q_t + sum_{s<=t} e^{c_t-c_s} (q_t.k_s) u_s)

    Where `is_fold` is set, the window's rows are taken into the checkpoint:
    S <- e^{c_P} S + sum_{s<=P} e^{c_P-c_s} u_s k_s^T over the P live rows. Appended at ring row
    (ring_start + history_len + t) mod R: k_t, v_t, a_t and b_t.

    Arguments, result and errors as in `verify`, but for:

    Args:
        state: checkpoints, [S, HV, V, K], bf16, fp16, fp32 or fp64; last stride 1; in-out.
        ring: raw ring of the layer: rows in-out, cursors in. No window has more than
            `ring.max_window` rows, folding ones included, which is what keeps a system small.
        max_verify_tokens: most rows of one request.

    Numerics:
        fp32 (fp64 if q, a or state is). Outputs are rounded once, a folded state once; appended
        rows are bits of the inputs where the ring has their dtype. Corrections are never rounded to
        16 bits: kernels multiply them as the sum of two 16-bit numbers, or in three products of
        tf32.

    Source:
        README.md of this package.
    """
    if out is None and isinstance(v, Tensor):
        out = v.new_empty(v.shape)
    _verify_raw(
        Rows(q, k, v, a, b, out),
        Gates(A_log, dt_bias, scale, use_qk_l2norm, beta_scale),
        State(state, None),
        ring,
        FoldingBatch(cu_seqlens, slots, is_fold, max_verify_tokens),
        backend=backend,
    )
    return out


def verify_raw_rows(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state: Tensor, ring: RawRingView, *,
    slots: Tensor | None = None, fold_threshold: int | None = None, scale: float | None = None,
    use_qk_l2norm: bool = True, out: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Run `verify_raw` on T rows of each request, with cursors of the batch rows; cursors stay.

    Request b folds where it has a slot and history_len[b] >= fold_threshold. Arguments, result
    and errors as in `verify_rows`, but for:

    Args:
        ring: raw ring of the layer, its cursors [B]: rows in-out, cursors in.
        slots: slot of each request, negative = padding, no slot twice, [B], int32; None: request b
            has slot b; in.
        out: where to write, [B, T, HV, V], any of these dtypes; any strides; rows of padding keep
            what they hold; out.

    Numerics:
        As `verify_raw`.

    Source:
        README.md of this package.
    """
    dims: Dims = {}
    for name, part, spec in (
        ("q", q, "B T H K"), ("k", k, "B T H K"), ("v", v, "B T HV V"), ("a", a, "B T HV"),
        ("b", b, "B T HV"),
    ):  # fmt: skip
        check(name, part, spec, dims)
    if out is None:
        target = v.new_empty(v.shape)
    else:
        check("out", out, "B T HV V", dims)
        target = out if is_packed(out) else out.contiguous()
    _verify_raw(
        Rows(*[part.flatten(0, 1) for part in (q, k, v, a, b)], target.flatten(0, 1)),
        Gates(A_log.contiguous(), dt_bias.contiguous(), scale, use_qk_l2norm, 1.0),
        State(state, None),
        ring,
        FoldingBatch(None, slots, None, dims["T"], fold_threshold, out is not None),
        backend=backend,
    )
    return target if out is None or out is target else out.copy_(target)


def explain_verify_raw(
    rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch
) -> dict[str, str | None]:
    """Say of each backend, in order of preference, why it cannot serve a call, or None."""
    return _verify_raw.explain(rows, gates, state, ring, batch)


def _check(rows: Rows, gates: Gates, state: State, ring: RawRingView, batch: FoldingBatch) -> None:
    by_name: dict[str, Any] = rows._asdict()
    dims: Dims = {}
    for name, spec in (
        ("k", "N H K"), ("q", "N H K"), ("v", "N HV V"), ("a", "N HV"), ("b", "N HV"),
        ("out", "N HV V"),
    ):  # fmt: skip
        check(name, by_name[name], spec, dims)
        check_last_stride(name, by_name[name])
        check_dtype(name, by_name[name], *(FLOATS if name not in "qk" else (rows.v.dtype,)))
    if dims["H"] == 0 or dims["HV"] % dims["H"]:
        raise ValueError(f"v: expected a multiple of k's {dims['H']} heads, got {dims['HV']}")
    parameters = {"A_log": gates.A_log, "dt_bias": gates.dt_bias}
    for name, part in parameters.items():
        check(name, part, "HV", dims)
        check_dtype(name, part, *FLOATS)
        check_last_stride(name, part)
    check("state", state.values, "S HV V K", dims)
    check_dtype("state", state.values, *FLOATS)
    check_last_stride("state", state.values)
    check_raw_ring_shapes(ring, dims, "B" if batch.cu_seqlens is None else "S")
    check_raw_ring(ring, batch.max_rows)
    _check_batch(batch, dims)
    if gates.scale is not None:
        check_option("scale", gates.scale, float)
    check_option("use_qk_l2norm", gates.use_qk_l2norm, bool)
    check_option("beta_scale", gates.beta_scale, float)
    check_devices(
        **{"v": rows.v} | by_name, **parameters, state=state.values, **raw_ring_tensors(ring),
        **{name: part for name, part in batch._asdict().items() if isinstance(part, Tensor)},
    )  # fmt: skip


def _check_batch(batch: FoldingBatch, dims: Dims) -> None:
    marks = {
        name: part for name in ("slots", "is_fold") if (part := getattr(batch, name)) is not None
    }
    if batch.cu_seqlens is None:
        check_marks(dims, **marks)
        if batch.fold_threshold is not None:
            check_threshold(batch.fold_threshold)
        return
    check_marks(dims, **marks)
    if "B" not in dims:
        raise TypeError("slots: expected a tensor [B], got NoneType")
    dims["B+1"] = dims["B"] + 1
    check("cu_seqlens", batch.cu_seqlens, "B+1", dims)
    check_dtype("cu_seqlens", batch.cu_seqlens, torch.int32)
    check_last_stride("cu_seqlens", batch.cu_seqlens)


RAW_BACKENDS = {
    "cuda": Backend(raw_cuda.explain, raw_cuda.verify, raw_cuda.prepare),
    "triton": Backend(raw_launch.explain, raw_launch.verify),
    "reference": Backend(always, raw_cpu.verify),
}
_verify_raw = register("gated_delta_rule.verify_raw", RAW_BACKENDS, _check)
