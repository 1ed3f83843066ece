"""Public functions on a layer's state and ring: contract, output allocation, operator call."""

from __future__ import annotations

from torch import Tensor

from hybridspec.ops._backends import always
from hybridspec.ops._library import Backend, register, register_kernel
from hybridspec.ops.gated_delta_rule import (
    cpu,
    cpu_prefill,
    fla,
    launch,
    launch_cuda,
    launch_ordered,
    ordered_cuda,
)
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.contracts import (
    check_fold,
    check_materialize,
    check_prefill,
    check_verify,
)
from hybridspec.ops.ring.view import RingView

__all__ = [
    "VERIFY_BACKENDS",
    "explain_prefill",
    "explain_verify",
    "fold",
    "materialize",
    "prefill",
    "verify",
]

VERIFY_BACKENDS = {
    "cuda": Backend.preparing(launch_cuda.explain_verify, launch_cuda.prepare),
    "triton": Backend(launch.explain_verify, launch.verify),
    "reference": Backend(always, cpu.verify),
    # Never chosen by "auto", which has found one before.
    "ordered": Backend(launch_ordered.explain_verify, launch_ordered.verify),
    "ordered_cuda": Backend.preparing(ordered_cuda.explain, ordered_cuda.prepare),
}


def prefill(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state: Tensor, ring: RingView, cu_seqlens: Tensor, slots: Tensor, *,
    max_seqlen: int, scale: float | None = None, use_qk_l2norm: bool = True,
    beta_scale: float = 1.0, chunk_size: int = 64, state_scale: Tensor | None = None,
    out: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Run prompt rows from the states of their slots and store the final states.

    Ring rows and cursors are neither read for values nor written. A prompt may come in parts, each
    continuing from the state that the one before stored. The equation, per row and value head:

        S <- e^{g_t} S;  u_t = beta_t (v_t - S k_t);  S <- S + u_t k_t^T;  y_t = scale S q_t
        g_t = -exp(A_log) softplus(a_t + dt_bias),  beta_t = beta_scale sigmoid(b_t)

    Arguments and result as in `verify`, but for:

    Args:
        ring: ring of the layer; its slots must have no live rows; in.
        max_seqlen: most rows of one request.
        chunk_size: rows that are solved at once.
        backend: "auto", "fla" or "reference".

    Raises:
        TypeError: for a dtype or an option of a kind that is not supported.
        UnsupportedError: if the requested backend does not support the call; the message says why.
        ValueError: for a wrong shape, stride, device, option or backend, or (reference) a slot
            with live rows or one that occurs twice, or more rows in a request than `max_seqlen`.

    Numerics:
        fp32 (fp64 if q, a or state is). The state is rounded once, at the end (int8 as in
        `fold`); outputs once. Chunks are solved by substitution, decays are exponentials
        of differences <= 0.
        "fla" (flash-linear-attention) accumulates in fp32, and rounds the normed q and k, the
        inverse of a chunk's system, the corrections and the state that each chunk reads to the
        dtype of q; the inverse is computed in tf32.

    Source:
        Gated Delta Networks (Yang et al. 2025, arXiv:2412.06464), section 3.3 and equation 10.
    """
    if out is None and isinstance(v, Tensor):
        out = v.new_empty(v.shape)
    _prefill(
        Rows(q, k, v, a, b, out), Gates(A_log, dt_bias, scale, use_qk_l2norm, beta_scale),
        State(state, state_scale), ring, FoldingBatch(cu_seqlens, slots, None, max_seqlen),
        chunk_size, backend=backend,
    )  # fmt: skip
    return out


def verify(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state: Tensor, ring: RingView, cu_seqlens: Tensor, slots: Tensor, *,
    max_verify_tokens: int, is_fold: Tensor | None = None, scale: float | None = None,
    use_qk_l2norm: bool = True, beta_scale: float = 1.0, state_scale: Tensor | None = None,
    rand_seed: Tensor | None = None, out: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Run the rows to verify and append them behind the live windows; cursors stay.

    Checkpoints are written only where `is_fold` is set: they then take in the live window, which
    holds committed rows only. With S_h the state after the window and c_t = g_1 + ... + g_t:

        u_t = beta_t (v_t - e^{c_t} S_h k_t) - sum_{s<t} beta_t e^{c_t-c_s} (k_t.k_s) u_s
        y_t = scale (e^{c_t} S_h q_t + sum_{s<=t} e^{c_t-c_s} (q_t.k_s) u_s)

    Appended at ring row (ring_start + history_len + t) mod R: u_t, k_t, and c_t plus the window's
    cumulative log-decay, or c_t alone where the step folds.

    Args:
        q: queries, [N, H, K], packed by request; last stride 1; in.
        k: keys, [N, H, K], dtype of `v`; last stride 1; in.
        v: values, [N, HV, V], HV a multiple of H, bf16, fp16, fp32 or fp64; last stride 1; in.
        a: decay inputs, [N, HV], any of these dtypes; last stride 1; in.
        b: write strength inputs, [N, HV], any of these dtypes; last stride 1; in.
        A_log: [HV], any of these dtypes; in.
        dt_bias: [HV], any of these dtypes; in.
        state: checkpoints, [S, HV, V, K], any of these dtypes or int8; last stride 1; in-out.
        ring: ring of the layer: rows in-out, cursors in.
        cu_seqlens: row bounds of the requests, [B+1], int32; contiguous; in.
        slots: slot of each request, -1 = padding, no slot twice, [B], int32; contiguous; in.
        max_verify_tokens: most rows of one request, at most `ring.max_window`.
        is_fold: which requests fold, with rows or without, [B], int8, from `decide_folds`. None:
            none folds. A step that folded must be committed; in.
        scale: factor of the outputs; None is K^-0.5.
        use_qk_l2norm: whether q and k are first scaled to length one per head.
        beta_scale: 2 lets the state have negative eigenvalues.
        state_scale: factors of an int8 state, [S, HV, V, K / 32], bf16; last stride 1; in-out.
        rand_seed: seed of stochastic rounding of folds into a 16-bit state, [1], int64; None: to
            nearest. The bits are a function of seed, slot, element and `ring_start`, so another
            seed for each step makes them a function of the number of the fold; in.
        out: where to write, [N, HV, V]; last stride 1; out.
        backend: "auto", "cuda", "triton", "reference", "ordered" or "ordered_cuda".

    Returns:
        [N, HV, V] in the dtype of `v`; zeros in rows that belong to no slot.

    Raises:
        TypeError: for a dtype or an option of a kind that is not supported.
        UnsupportedError: if the requested backend does not support the call; the message says why.
        ValueError: for a wrong shape, stride, device, ring capacity, option or backend, or
            (reference) a slot that occurs twice, or more rows in a request than
            `max_verify_tokens`.

    Numerics:
        fp32 (fp64 if q, a or state is). Outputs are rounded once, to the dtype of `out`; appended
        rows once, to those of the ring; a folded state once, to its own (int8 as in `fold`; the
        step's own outputs are those of the state before that rounding). Decays are exponentials
        of differences <= 0; the triangular system is solved by substitution.
        "triton" accumulates in fp32 and, with 16-bit activations, rounds the coefficients of its
        matrix products to the dtype that they multiply: that of q for new rows, of the state, and
        of the ring (fp32 tensors are multiplied in tf32); a fold rounds the decayed u once more.
        With fp32 activations every product is full fp32.
        "ordered": the bits of a row do not depend on how rows are cut into steps; a step that folds
        reads the folded state as it is rounded (README.md). "ordered_cuda": the same of another
        kernel with other bits, in CUDA C++.

    Source:
        The delta rule of Gated Delta Networks (Yang et al. 2025, arXiv:2412.06464), equation 10;
        README.md of this package derives the form used here.
    """
    if out is None and isinstance(v, Tensor):
        out = v.new_empty(v.shape)
    _verify(
        Rows(q, k, v, a, b, out), Gates(A_log, dt_bias, scale, use_qk_l2norm, beta_scale),
        State(state, state_scale), ring,
        FoldingBatch(cu_seqlens, slots, is_fold, max_verify_tokens, rand_seed=rand_seed),
        backend=backend,
    )  # fmt: skip
    return out


def fold(
    state: Tensor, ring: RingView, slots: Tensor, *,
    is_fold: Tensor, state_scale: Tensor | None = None, backend: str = "auto",
) -> None:  # fmt: skip
    """Fold the live windows of the marked requests into their checkpoints; cursors stay.

    S <- e^{G_P} S + sum_j e^{G_P - G_j} u_j k_j^T over the P live rows. `commit` with the same
    `is_fold` then empties the windows.

    Args:
        state: checkpoints, [S, HV, V, K]; in-out.
        ring: ring of the layer; in.
        slots: slot of each request, -1 = padding, no slot twice, [B], int32; contiguous; in.
        is_fold: which requests fold, [B], int8; contiguous; in.
        state_scale: factors of an int8 state, [S, HV, V, K / 32], bf16; in-out.
        backend: "auto", "triton" or "reference".

    Raises:
        TypeError: for a dtype that is not supported.
        UnsupportedError: if the requested backend does not support the call; the message says why.
        ValueError: for a wrong shape, stride, device, ring or backend, or (reference) a slot that
            would be written twice.

    Numerics:
        fp32 (fp64 if the state is); the state is rounded once. An int8 state is the product of
        integers and of one factor for 32 neighbours along K, which makes the largest of them 127:
        scale = bf16(max |x| / 127), state = round(x / scale). A group with a value that is not
        finite reads as NaN.

    Source:
        README.md of this package.
    """
    _fold(State(state, state_scale), ring, slots, is_fold, backend=backend)


def materialize(
    state: Tensor, ring: RingView, slots: Tensor, out_slots: Tensor, num_rows: Tensor, *,
    state_scale: Tensor | None = None, backend: str = "auto",
) -> None:  # fmt: skip
    """Write the state after the first live rows of a slot into a slot; cursors stay.

    state[out_slot] <- e^{G_n} S + sum_{j<=n} e^{G_n - G_j} u_j k_j^T, n = num_rows. Arguments,
    errors and numerics as in `fold`, but for:

    Args:
        slots: slot to read of each request, [B], int32; contiguous; in.
        out_slots: slot to write, which may be the one that is read, but none that another request
            reads or writes, [B], int32; pairs with a -1 are skipped; in.
        num_rows: live rows to take in, cut to 0..history_len, [B], int32; contiguous; in.
    """
    _materialize(State(state, state_scale), ring, slots, out_slots, num_rows, backend=backend)


def explain_verify(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch
) -> dict[str, str | None]:
    """Return for each backend, by preference, why it does not support a verify call, or None."""
    return _verify.explain(rows, gates, state, ring, batch)


def explain_prefill(
    rows: Rows, gates: Gates, state: State, ring: RingView, batch: FoldingBatch, *,
    chunk_size: int = 64,
) -> dict[str, str | None]:  # fmt: skip
    """Return for each backend, by preference, why it does not support a prefill, or None."""
    return _prefill.explain(rows, gates, state, ring, batch, chunk_size)


_prefill = register(
    "gated_delta_rule.prefill",
    {
        "fla": Backend(fla.explain, fla.prefill),
        "reference": Backend(always, cpu_prefill.prefill),
    },
    check_prefill,
)
_verify = register("gated_delta_rule.verify", VERIFY_BACKENDS, check_verify)
_fold = register_kernel(
    "gated_delta_rule.fold", launch.explain_advance, launch.fold, cpu.fold, check_fold
)
_materialize = register_kernel(
    "gated_delta_rule.materialize",
    launch.explain_advance,
    launch.materialize,
    cpu.materialize,
    check_materialize,
)
