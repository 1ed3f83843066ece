"""RMS and L2 normalisation, and the gates of a Gated DeltaNet layer."""

from __future__ import annotations

from hybridspec.ops.norms.reference import gated_rms_norm, gdn_gates, l2_norm, rms_norm, widened

__all__ = ["gated_rms_norm", "gdn_gates", "l2_norm", "rms_norm", "widened"]
