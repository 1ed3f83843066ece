"""Verify for engines whose states lie in blocks: a table says whose, and marks belong to blocks.

Arithmetic, kernels and reference are those of `verify`. Block tables are read as they are, by any
stride, with any number for padding, so that nothing has to be gathered or copied before a step.
"""

from __future__ import annotations

from torch import Tensor

from hybridspec.ops._library import register
from hybridspec.ops.gated_delta_rule.api import VERIFY_BACKENDS
from hybridspec.ops.gated_delta_rule.call import FoldingBatch, Gates, Rows, State
from hybridspec.ops.gated_delta_rule.contracts import check_verify
from hybridspec.ops.ring.view import RingView

__all__ = ["verify_blocks"]


def verify_blocks(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state: Tensor, ring: RingView, cu_seqlens: Tensor, blocks: Tensor, *,
    max_verify_tokens: int, is_fold: Tensor, padding: int = -1, scale: float | None = None,
    use_qk_l2norm: bool = True, out: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Run `verify` on requests whose slots, here blocks, carry the marks; cursors and marks stay.

    The equation: `verify`.

    Args:
        q: queries, [N, H, K], packed by request; last stride 1; in.
        k: keys, [N, H, K], dtype of `v`; last stride 1; in.
        v: values, [N, HV, V], HV a multiple of H, bf16, fp16, fp32 or fp64; last stride 1; in.
        a: decay inputs, [N, HV], any of these dtypes; last stride 1; in.
        b: write strength inputs, [N, HV], any of these dtypes; last stride 1; in.
        A_log: [HV], any of these dtypes; in.
        dt_bias: [HV], any of these dtypes; in.
        state: checkpoints, [S, HV, V, K], any of these dtypes; last stride 1; in-out.
        ring: ring of the layer: rows in-out, cursors in.
        cu_seqlens: row bounds of the requests, [B+1], int32; contiguous; in.
        blocks: slot of each request, padding if at most `padding`, no slot twice, [B], int32; any
            stride; in.
        max_verify_tokens: most rows of one request, at most `ring.max_window`.
        is_fold: which slots fold if a request has them, with rows or without, [S], int8; in.
        padding: largest number that is no slot, at least -1.
        scale: factor of the outputs; None is K^-0.5.
        use_qk_l2norm: whether q and k are first scaled to length one per head.
        out: where to write, [N, HV, V]; last stride 1; out.
        backend: "auto", "cuda", "triton" or "reference".

    Returns:
        [N, HV, V] in the dtype of `v`; zeros in rows that belong to no slot.

    Raises:
        TypeError: for a dtype or an option of a kind that is not supported.
        UnsupportedError: if the backend asked for cannot serve the call; the message says why.
        ValueError: for a wrong shape, stride, device, ring capacity, option or backend.

    Numerics:
        As `verify`.

    Source:
        README.md of this package.
    """
    if out is None and isinstance(v, Tensor):
        out = v.new_empty(v.shape)
    _verify_blocks(
        Rows(q, k, v, a, b, out),
        Gates(A_log, dt_bias, scale, use_qk_l2norm, 1.0),
        State(state, None),
        ring,
        FoldingBatch(
            cu_seqlens, blocks, is_fold, max_verify_tokens, padding=padding, is_fold_by_slot=True
        ),
        backend=backend,
    )
    return out


_verify_blocks = register("gated_delta_rule.verify_blocks", VERIFY_BACKENDS, check_verify)
