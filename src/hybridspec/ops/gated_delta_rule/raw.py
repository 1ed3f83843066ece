"""Verify over a raw ring: contract and calls.

The ring keeps k, v and the gate inputs as they came, and corrections are recomputed from them
whenever they are needed. So nothing is rounded between a token and the fold that takes it in.
"""

from __future__ import annotations

from torch import Tensor

from hybridspec.ops._backends import always
from hybridspec.ops._checks import Dims, check
from hybridspec.ops._library import Backend, register
from hybridspec.ops.gated_delta_rule import raw_cpu, raw_cuda, raw_launch
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State, is_packed
from hybridspec.ops.gated_delta_rule.contracts import check_verify_raw
from hybridspec.ops.ring.view import RawRingView

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
        Rows(q, k, v, a, b, out), Gates(A_log, dt_bias, scale, use_qk_l2norm, beta_scale),
        State(state, None), ring, FoldingBatch(cu_seqlens, slots, is_fold, max_verify_tokens),
        backend=backend,
    )  # fmt: skip
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
    """Return for each backend, by preference, why it does not support a call, or None."""
    return _verify_raw.explain(rows, gates, state, ring, batch)


RAW_BACKENDS = {
    "cuda": Backend.preparing(raw_cuda.explain, raw_cuda.prepare),
    "triton": Backend(raw_launch.explain, raw_launch.verify),
    "reference": Backend(always, raw_cpu.verify),
}
_verify_raw = register("gated_delta_rule.verify_raw", RAW_BACKENDS, check_verify_raw)
