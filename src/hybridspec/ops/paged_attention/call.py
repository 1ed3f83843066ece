"""The arguments of a call, in groups that travel together."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hybridspec.ops._library import Written

__all__ = ["Pages", "Rows"]


class Rows(NamedTuple):
    """Rows of a step or a prompt, packed by request, and where their results go.

    Attributes:
        q: queries, [N, Hq, D].
        k: keys, [N, Hkv, D].
        v: values, [N, Hkv, D].
        out: results, [N, Hq, D].
        scale: factor of the scores; None is D ** -0.5.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Written[Tensor]
    scale: float | None

    def score_scale(self) -> float:
        """Return the factor of the scores, with its default."""
        return self.q.shape[2] ** -0.5 if self.scale is None else self.scale


class Pages(NamedTuple):
    """Keys and values of all slots.

    Attributes:
        k: stored keys, [P, page_size, Hkv, D].
        v: stored values, [P, page_size, Hkv, D].
        table: page numbers of each slot, [S, max_pages].
        seq_len: positions stored so far, [S].
    """

    k: Written[Tensor]
    v: Written[Tensor]
    table: Tensor
    seq_len: Tensor
