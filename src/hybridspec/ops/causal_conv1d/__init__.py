"""Depthwise causal convolution whose memory is a ring of raw inputs."""

from hybridspec.ops.causal_conv1d.api import prefill, verify, verify_backends

__all__ = ["prefill", "verify", "verify_backends"]
