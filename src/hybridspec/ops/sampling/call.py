"""The arguments of a call, in groups that travel together; besides the options of the slots."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Rows", "Text"]


class Rows(NamedTuple):
    """Rows of logits.

    Attributes:
        slots: slot of each row, -1 = padding row, [N].
        offsets: how many drafts each row has seen, [N].
        mask: more bits of tokens that may be chosen, [N, ceil(V / 32)], or None.
    """

    slots: Tensor
    offsets: Tensor
    mask: Tensor | None


class Text(NamedTuple):
    """The tokens of each slot.

    Attributes:
        seq_len: position of the newest committed token, [S].
        drafts: tokens behind it, [S, k].
        token_pages: the log of committed tokens, [P, page_size].
        page_table: [S, pages].
    """

    seq_len: Tensor
    drafts: Tensor
    token_pages: Tensor
    page_table: Tensor
