"""The norm of the models, and the gates of a Gated DeltaNet layer."""

from __future__ import annotations

from hybridspec.ops.norms.api import add_rms_norm, gated_rms_norm, rms_norm
from hybridspec.ops.norms.model_norm import RmsNorm
from hybridspec.ops.norms.reference import gdn_gates, widened

__all__ = ["RmsNorm", "add_rms_norm", "gated_rms_norm", "gdn_gates", "rms_norm", "widened"]
