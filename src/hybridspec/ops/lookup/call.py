"""The arguments of a call, in groups that travel together."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hybridspec.ops._library import Written

__all__ = ["Found", "Log", "Search"]


class Log(NamedTuple):
    """The tokens of each slot.

    Attributes:
        token_pages: [P, page_size].
        page_table: [S, pages].
        seq_len: position of each slot's newest token, [S].
    """

    token_pages: Tensor
    page_table: Tensor
    seq_len: Tensor


class Search(NamedTuple):
    """Which places are looked at.

    Attributes:
        num_tokens: how many tokens must agree for a place to count.
        max_places: places to compare.
        max_agreement: how many tokens are compared at a place.
    """

    num_tokens: int
    max_places: int
    max_agreement: int


class Found(NamedTuple):
    """Where the results go.

    Attributes:
        drafts: [B, k].
        num: drafts of each request, [B].
        agreement: how many tokens agree, [B].
    """

    drafts: Written[Tensor]
    num: Written[Tensor]
    agreement: Written[Tensor]
