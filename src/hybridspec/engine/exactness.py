"""What an engine that is exact bit for bit needs, and which options it excludes.

Drafts, batch and load must not change one bit of a logit: docs/exactness.md explains how.
"""

from __future__ import annotations

import torch

from hybridspec.config import EngineConfig
from hybridspec.errors import UnsupportedError

__all__ = [
    "ALIGNED_WINDOW",
    "check_bitwise",
    "describe_exactness",
    "is_row_by_row",
]

# Rows of a window, which no step's rows cross the end of: the longer, the fewer drafts are cut, and
# window and rows of a step fit the ring's 32.
ALIGNED_WINDOW = 24


def is_row_by_row(config: EngineConfig, device: torch.device) -> bool:
    """Whether every row to verify is a forward pass of its own."""
    return config.exact == "bitwise" and device.type == "cpu"


def check_bitwise(config: EngineConfig, device: torch.device, state_dtype: torch.dtype) -> None:
    """Raise UnsupportedError, naming it, if something is asked for that cannot be exact bitwise."""
    refused = {
        "attention_backend": (
            config.attention_backend == "fa3",
            "FlashAttention-3 splits keys by the load of the device",
        ),
        "attention_backend, device": (
            config.attention_backend == "reference" and device.type != "cpu",
            "plain PyTorch promises no order of its sums",
        ),
        "kv_layout": (
            config.kv_layout == "contiguous" and device.type != "cpu",
            "only attention over pages adds up in a fixed order",
        ),
        "ring": (config.ring == "raw", "its windows have no fixed borders"),
        "state_dtype": (
            state_dtype is torch.int8,
            "8-bit states are folded by kernels that add up in another order",
        ),
    }
    for name, (is_refused, reason) in refused.items():
        if is_refused:
            raise UnsupportedError(f"exact: 'bitwise' does not go with this {name}: {reason}")
    if device.type != "cpu" and torch.cuda.get_device_capability(device) != (9, 0):
        raise UnsupportedError(
            "exact: 'bitwise' does not go with this device: prompts run by kernels that have fixed "
            "configurations on Hopper only"
        )


def describe_exactness(config: EngineConfig) -> str:
    """Describe what does not change, and by what means."""
    if config.exact == "tokens":
        return "the same tokens, except where rounding decides between two that nearly tie"
    if config.device == "cpu":
        return "bit for bit: each row is a forward pass of its own, so drafts save no time"
    return "bit for bit: sums in a fixed order, drafts end at window boundaries"
