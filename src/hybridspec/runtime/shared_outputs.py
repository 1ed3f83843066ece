"""Memory that captured graphs of different batch sizes write their outputs to.

A captured graph keeps addresses, not tensors, so no use count protects what it writes: such memory
must never be recycled. Graphs of one purpose are never read at the same time, and share it by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage

from hybridspec.errors import CapacityError
from hybridspec.runtime.use_count import make_template

__all__ = ["SharedOutputs"]


class SharedOutputs:
    """Named storages; all tensors of one name start at the same address."""

    def __init__(self, device: torch.device | str | int = "cpu") -> None:
        """Make an empty set of names.

        Args:
            device: where the memory lies.
        """
        self.device = torch.device(device)
        self._storages: dict[str, UntypedStorage] = {}

    def reserve(self, name: str, num_bytes: int) -> None:
        """Set memory aside for the largest batch.

        Args:
            name: what it holds; two outputs that must survive each other need two names.
            num_bytes: its size.

        Raises:
            ValueError: if the name is taken or the size is not positive.
            RuntimeError: if the current stream captures a graph. Memory from a graph's own pool
                may be scratch of graphs captured earlier in that pool, and their replay would
                overwrite it.
        """
        if name in self._storages:
            raise ValueError(f"name: {name!r} is reserved already; release it first")
        if num_bytes <= 0:
            raise ValueError(f"num_bytes: expected at least 1, got {num_bytes}")
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{name!r} must be reserved before the capture starts")
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._storages[name] = memory.untyped_storage()

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a contiguous tensor over the front of a name's memory.

        A graph that writes it knows the address only: keep the tensor as long as the graph.

        Args:
            name: a reserved name.
            shape: sizes.
            dtype: element type.

        Returns:
            The tensor, [*shape], holding whatever was last written there.

        Raises:
            ValueError: if the name is not reserved.
            CapacityError: if the tensor needs more bytes than were reserved.
        """
        storage = self._storages.get(name)
        if storage is None:
            raise ValueError(f"name: expected one of {sorted(self._storages)}, got {name!r}")
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > storage.nbytes():
            raise CapacityError(
                f"{name!r}: {list(shape)} needs {num_bytes} bytes, {storage.nbytes()} are reserved"
            )
        return make_template(storage, shape, dtype)

    def release(self, name: str) -> None:
        """Give a name up; its memory is freed when no tensor over it is left."""
        if self._storages.pop(name, None) is None:
            raise ValueError(f"name: expected one of {sorted(self._storages)}, got {name!r}")
