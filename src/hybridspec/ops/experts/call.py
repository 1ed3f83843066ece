"""The arguments of a call, in groups that travel together."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Matrices"]


class Matrices(NamedTuple):
    """Weights of gated MLPs: down(silu(gate x) * up x).

    Attributes:
        gate_up: of every routed expert, the gate first, [E, 2 F, D].
        down: of every routed expert, [E, D, F].
        shared_gate_up: of the expert that every row passes, [2 G, D].
        shared_down: of the expert that every row passes, [D, G].
    """

    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor
    shared_down: Tensor
