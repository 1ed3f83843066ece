"""The arguments of a call, in groups that travel together; besides the `Step` that is planned."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Cursors", "Drafts", "Entries"]


class Drafts(NamedTuple):
    """What is known of the drafts of a batch.

    Attributes:
        confidences: the drafter's probability of each draft, [B, k].
        num_drafts: drafts that each request may verify, [B]; None: all k.
        calibration: observed acceptance by draft and confidence bin, [k, M], or None.
    """

    confidences: Tensor
    num_drafts: Tensor | None
    calibration: Tensor | None


class Cursors(NamedTuple):
    """Cursors of all slots.

    Attributes:
        seq_len: tokens stored, [S].
        history_len: live ring rows, [S].
        ring_start: first live ring row, [S]; None: only full windows are folded.
        max_window: most live ring rows W.
    """

    seq_len: Tensor
    history_len: Tensor
    ring_start: Tensor | None
    max_window: int


class Entries(NamedTuple):
    """One entry per request, for attention libraries, [num_entries], int32.

    Attributes:
        query_len: rows of the request.
        seq_len: tokens that its last row sees.
        request: which request it is.
    """

    query_len: Tensor
    seq_len: Tensor
    request: Tensor
