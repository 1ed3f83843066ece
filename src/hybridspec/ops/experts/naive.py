"""The mixture as its definition reads: row by row and expert by expert, in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mix(
    x: Tensor, scores: Tensor, matrices: Any, out: Tensor, per_row: int, is_normalized: bool
) -> None:
    """Add to every row what its experts make of it."""
    gate_up, down, shared_gate_up, shared_down = (part.double() for part in matrices)
    for row in range(x.shape[0]):
        score = scores[row].double()
        probs = score[:-1].softmax(0)
        # Of equal scores the first expert's counts more.
        chosen = sorted(range(len(probs)), key=lambda e: (-score[e].item(), e))[:per_row]
        total = sum(probs[e] for e in chosen) if is_normalized else 1.0
        y = score[-1].sigmoid() * _mlp(x[row].double(), shared_gate_up, shared_down)
        for e in chosen:
            y = y + probs[e] / total * _mlp(x[row].double(), gate_up[e], down[e])
        out[row] += y


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (gate * torch.sigmoid(gate) * up)
