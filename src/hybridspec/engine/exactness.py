"""What an engine that is exact bit for bit needs, and what it cannot be.

Drafts, batch and load must not change one bit of a logit: docs/exactness.md says by what means.
"""

from __future__ import annotations

import torch

from hybridspec.config import EngineConfig
from hybridspec.errors import UnsupportedError
from hybridspec.models import ModelConfig

__all__ = ["ALIGNED_WINDOW", "check_bitwise", "describe_exactness", "is_row_by_row"]

# Rows of a window, which no step's rows cross the end of: the longer, the fewer drafts are cut, and
# window and rows of a step fit the ring's 32.
ALIGNED_WINDOW = 24


def is_row_by_row(config: EngineConfig, device: torch.device) -> bool:
    """Whether every row to verify is a forward pass of its own."""
    return config.exact == "bitwise" and device.type == "cpu"


def check_bitwise(
    config: EngineConfig, model: ModelConfig, device: torch.device, state_dtype: torch.dtype
) -> None:
    """Raise UnsupportedError, naming it, if something is asked for that cannot be exact bitwise."""
    refused = {
        "attention_backend": (
            config.attention_backend == "fa3",
            "FlashAttention-3 splits keys by the load of the device",
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
        "model": (
            model.moe is not None and device.type != "cpu",
            "the products of a mixture of experts are split by the rows of each expert",
        ),
        "device": (device.type != "cpu", "its kernels add up in an order that follows the load"),
    }
    for name, (is_refused, reason) in refused.items():
        if is_refused:
            raise UnsupportedError(f"exact: 'bitwise' does not go with this {name}: {reason}")


def describe_exactness(config: EngineConfig) -> str:
    """Say what holds, and by what means."""
    if config.exact == "tokens":
        return "the same tokens, but where rounding decides between two that nearly tie"
    if config.device == "cpu":
        return "bit for bit: each row is a forward pass of its own, so drafts save no time"
    return "bit for bit: sums in a fixed order, drafts end at the borders of windows"
