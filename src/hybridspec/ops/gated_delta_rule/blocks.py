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

    Equation, arguments, result and errors as in `verify`, but for:

    Args:
        state: checkpoints, [S, HV, V, K], bf16, fp16, fp32 or fp64; last stride 1; in-out.
        blocks: slot of each request, padding if at most `padding`, no slot twice, [B], int32; any
            stride; in.
        is_fold: which slots fold if a request has them, with rows or without, [S], int8; in.
        padding: largest number that is no slot, at least -1.

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
