"""The way of values from the host to where the steps run."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

__all__ = ["to_device", "upload_parts"]


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor to a device without waiting for what runs there.

    Only a copy from pinned memory is not waited for; torch keeps that memory until it is done.

    Args:
        host: a tensor on the CPU.
        device: where to.
    """
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def upload_parts(parts: list[array[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Bring several lists of numbers to a device in one copy.

    Args:
        parts: arrays of type "i", not all of them empty.
        device: where to.

    Returns:
        A tensor of each, int32.
    """
    packed = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int32)
    return torch.split(to_device(packed, device), [len(part) for part in parts])
