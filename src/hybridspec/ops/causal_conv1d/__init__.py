"""Depthwise causal convolution whose memory is a ring of raw inputs."""

from hybridspec.ops._requests import Batch
from hybridspec.ops.causal_conv1d.api import explain_verify, prefill, verify
from hybridspec.ops.causal_conv1d.call import Log, Rows, Taps

__all__ = ["Batch", "Log", "Rows", "Taps", "explain_verify", "prefill", "verify"]
