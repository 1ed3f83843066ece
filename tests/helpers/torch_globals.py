"""What a caller may set in torch for all that follows, each as a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["GLOBALS"]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


GLOBALS: dict[str, Any] = {
    "fp64": lambda: default_dtype(torch.float64),
    "bf16": lambda: default_dtype(torch.bfloat16),
    "fp16": lambda: default_dtype(torch.float16),
    "device": lambda: default_device("meta"),
    "device for a while": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast fp16": lambda: torch.autocast("cpu", torch.float16),
    "gradients": torch.enable_grad,
    "inference mode": torch.inference_mode,
}
