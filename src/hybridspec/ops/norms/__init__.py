"""The norm of the models, and the gates of a Gated DeltaNet layer."""

from __future__ import annotations

from hybridspec.ops.norms.reference import gdn_gates, widened
from hybridspec.ops.norms.rms_norm import RmsNorm

__all__ = ["RmsNorm", "gdn_gates", "widened"]
