"""Gates between the products of a layer: SwiGLU, and the sigmoid gate of attention."""

from __future__ import annotations

from hybridspec.ops.activations.api import sigmoid_gate, swiglu

__all__ = ["sigmoid_gate", "swiglu"]
