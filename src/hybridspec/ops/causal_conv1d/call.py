"""The arguments of a call, in groups that travel together."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hybridspec.ops._library import Written

__all__ = ["Log", "Rows", "Taps"]


class Rows(NamedTuple):
    """Rows of a step or a prompt, packed by request, and where their results go.

    Attributes:
        x: raw inputs, [N, D].
        out: results, [N, D].
    """

    x: Tensor
    out: Written[Tensor]


class Taps(NamedTuple):
    """What a layer does with its inputs.

    Attributes:
        weight: taps, newest last, [D, width].
        bias: added before the activation, [D], or None.
        activation: "silu" or None.
    """

    weight: Tensor
    bias: Tensor | None
    activation: str | None


class Log(NamedTuple):
    """Inputs of each slot.

    Attributes:
        conv_ring: [S, R, D]; position p is row p mod R.
        seq_len: positions stored so far, [S].
    """

    conv_ring: Written[Tensor]
    seq_len: Tensor
