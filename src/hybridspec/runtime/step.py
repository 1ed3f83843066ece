"""How one forward pass is laid out: which rows belong to which request, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Row layout of one forward pass, shared by all its layers.

    Attributes:
        cu_seqlens: [B+1] int32, row offsets of the requests in the packed batch.
        slots: [B] int32, the slot of each request; -1 is padding.
        positions: [N] int64, position of each row in its request.
        seq_len: [S] int32, rows already in the logs; what the layers read and append behind.
        max_rows: most rows of one request.
        is_prefill: whether the rows are prompt rows (stored directly) or rows to verify (appended).
        is_fold: [B] int8 or None, which requests fold in this step.
    """

    cu_seqlens: Tensor
    slots: Tensor
    positions: Tensor
    seq_len: Tensor
    max_rows: int
    is_prefill: bool
    is_fold: Tensor | None = None
