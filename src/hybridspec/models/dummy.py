"""Random numbers in place of the files of a checkpoint, to measure a geometry without them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["DummyCheckpoint"]

_BLOCK_ELEMENTS = 16 << 20
# Mean and deviation by the end of a name; matrices get 0 and the root of their inverse width.
_SPREADS = (
    ("linear_attn.norm.weight", 1.0, 0.1),
    ("norm.weight", 0.0, 0.1),  # zero-centred: the factor is one more
    ("A_log", 0.5, 0.5),
    ("dt_bias", 0.0, 0.5),
    ("conv1d.weight", 0.0, 0.5),
    ("embed_tokens.weight", 0.0, 1.0),
)


class DummyCheckpoint:
    """Stands for files with any tensor that is asked for, experts fused; made up on the device.

    The numbers are such that activations keep their size from layer to layer. They are the same
    each time on the same kind of device.

    Args:
        device: where tensors are made.
        has_mtp: whether there is a draft head.

    Attributes:
        num_parameters: elements of the tensors made so far.
    """

    def __init__(self, device: torch.device, *, has_mtp: bool) -> None:
        self.device = device
        self.num_parameters = 0
        self._has_mtp = has_mtp
        self._generator = torch.Generator(device).manual_seed(0)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name, asked where a file may have one of two forms."""
        return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))

    def has_prefix(self, prefix: str) -> bool:
        """Whether any tensor's name starts with `prefix`."""
        return self._has_mtp if prefix.startswith("mtp.") else prefix == "model."

    def dtype(self, name: str) -> torch.dtype:
        """Return bfloat16, in which the models of these families are published."""
        return torch.bfloat16

    def blocks(
        self, name: str, shape: tuple[int, ...], *, is_whole: bool = False
    ) -> Iterator[tuple[slice, Tensor]]:
        """Make a tensor up, some rows at a time; fp32."""
        mean, deviation = next(
            ((mean, deviation) for end, mean, deviation in _SPREADS if name.endswith(end)),
            (0.0, shape[-1] ** -0.5),
        )
        self.num_parameters += math.prod(shape)
        step = shape[0] if is_whole else max(_BLOCK_ELEMENTS // math.prod(shape[1:]), 1)
        for start in range(0, shape[0], step):
            rows = slice(start, min(start + step, shape[0]))
            block = torch.empty(
                rows.stop - start, *shape[1:], dtype=torch.float32, device=self.device
            )
            yield rows, block.normal_(mean, deviation, generator=self._generator)

    def skip(self, prefix: str) -> None:
        """Nothing exists beyond what was asked for."""

    def finish(self) -> None:
        """Nothing is open."""
