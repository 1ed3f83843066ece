"""The arguments of a call, in groups that travel together; besides the ring of the layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec.ops._library import Written
from hybridspec.ops.ring.view import RawRingView, RingView

__all__ = ["FoldingBatch", "Gates", "Rows", "State", "is_packed"]


class Rows(NamedTuple):
    """Rows of a step or a prompt, packed by request, and where their results go.

    Attributes:
        q: queries, [N, H, K].
        k: keys, [N, H, K].
        v: values, [N, HV, V].
        a: decay inputs, [N, HV].
        b: write strength inputs, [N, HV].
        out: results, [N, HV, V].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    out: Written[Tensor]


class Gates(NamedTuple):
    """What a layer does with its inputs.

    Attributes:
        A_log: [HV].
        dt_bias: [HV].
        scale: factor of the outputs; None is K^-0.5.
        use_qk_l2norm: whether q and k are first scaled to length one per head.
        beta_scale: largest write strength.
    """

    A_log: Tensor
    dt_bias: Tensor
    scale: float | None
    use_qk_l2norm: bool
    beta_scale: float

    def output_scale(self, key_dim: int) -> float:
        """Return the factor of the outputs, with its default."""
        return key_dim**-0.5 if self.scale is None else self.scale


class State(NamedTuple):
    """Checkpoints of a layer.

    Attributes:
        values: [S, HV, V, K].
        scale: factors of an int8 state, [S, HV, V, K / 32], else None.
    """

    values: Written[Tensor]
    scale: Written[Tensor | None]


class FoldingBatch(NamedTuple):
    """Whose the rows are, and who folds.

    Attributes:
        cu_seqlens: row bounds of the requests, [B+1]; None: equally many rows each, and the ring's
            cursors are those of the requests, [B].
        slots: slot of each request, padding if at most `padding`, [B]; None: request b has slot b.
        is_fold: requests that fold, [B]; or slots that do, [S]; None: see `fold_threshold`.
        max_rows: most rows of one request.
        fold_threshold: fewest live rows of a request that folds; None: only `is_fold` decides.
        keeps_padding: whether outputs of requests without a slot stay as they are, not zeroed.
        padding: largest number that is no slot, at least -1.
        is_fold_by_slot: whether `is_fold` says it of slots.
        rand_seed: seed of the rounding of folded states, [1], int64; None: to nearest.
    """

    cu_seqlens: Tensor | None
    slots: Tensor | None
    is_fold: Tensor | None
    max_rows: int
    fold_threshold: int | None = None
    keeps_padding: bool = False
    padding: int = -1
    is_fold_by_slot: bool = False
    rand_seed: Tensor | None = None

    def num_requests(self, ring: RingView | RawRingView) -> int:
        """Count the requests, padding included."""
        return (ring.history_len if self.slots is None else self.slots).shape[0]

    def by_request(self) -> tuple[Tensor, Tensor | None]:
        """Return slots with padding as -1, and which requests fold, [B]."""
        assert self.slots is not None
        slots, is_fold = self.slots, self.is_fold
        if is_fold is not None and self.is_fold_by_slot:
            is_fold = is_fold[slots.clamp(min=0).long()]
        if self.padding >= 0:
            slots = torch.where(slots > self.padding, slots, -1)
        return slots, is_fold


def is_packed(out: Tensor) -> bool:
    """Whether all rows of a batch [B, T, HV, V] are equally far apart, with a last stride of 1."""
    if not isinstance(out, Tensor) or out.dim() != 4:
        return True  # not looked at: it is refused
    batch, num_tokens = out.shape[:2]
    is_even = batch < 2 or num_tokens < 2 or out.stride(0) == num_tokens * out.stride(1)
    return is_even and out.stride(3) == 1
