"""RMS and L2 normalisation, and the gates of a Gated DeltaNet layer."""

from __future__ import annotations

from hybridspec.ops.norms.api import gated_rms_norm, rms_norm
from hybridspec.ops.norms.reference import gdn_gates, l2_norm, widened

__all__ = ["gated_rms_norm", "gdn_gates", "l2_norm", "rms_norm", "widened"]
