"""How many owners a storage has, and what that count reads when the storage is unused.

Every tensor, whatever view of whatever view it is, owns its storage in C++; so does a saved tensor
of autograd, a DLPack capsule or a NumPy array (through the tensor it holds). A Python handle
(`tensor.untyped_storage()`) is one object shared by all who ask for it and shows only in that
object's own reference count. Two counts together therefore see every user, and both have an idle
value that depends on the release of torch, the mode and the interpreter: it is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage

__all__ = ["Bias", "CountError", "Reading", "calibrate", "count_uses", "make_template", "read"]

count_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda cdata: 0)


class CountError(RuntimeError):
    """The use count does not tell whether a storage is in use."""


class HasStorage(Protocol):
    """An object that keeps a storage and its C++ address."""

    storage: UntypedStorage
    cdata: int


class Reading(NamedTuple):
    """Both counts of one storage: its owners in C++, and references to its Python object."""

    uses: int
    refs: int


def read(buffer: HasStorage) -> Reading:
    """Return both counts of a buffer's storage.

    The caller's expression matters to the second count, so that every comparison with a calibrated
    value passes the handle as `buffer.storage`, as here.
    """
    return Reading(count_uses(buffer.cdata), getrefcount(buffer.storage))


def make_template(storage: UntypedStorage, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor over the front of a storage; it is no view of another tensor.

    Args:
        storage: memory to use; at least as many bytes as the shape needs.
        shape: sizes.
        dtype: element type.

    Returns:
        The tensor, an inference tensor if made in inference mode.
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, 0, shape, strides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """What the two counts read for a storage that only its cache holds.

    Attributes:
        uses: C++ owners without templates.
        uses_per_template: further owners for each template (a tensor the cache keeps on it).
        refs: references to the Python object without templates.
        refs_with_templates: the same with at least one template.
    """

    uses: int
    uses_per_template: int
    refs: int
    refs_with_templates: int

    def idle(self, num_templates: int) -> Reading:
        """Return the reading of an idle storage that has that many templates."""
        refs = self.refs_with_templates if num_templates else self.refs
        return Reading(self.uses + num_templates * self.uses_per_template, refs)


def calibrate(device: torch.device) -> Bias:
    """Measure the idle counts by allocating and dropping, in each mode that changes ownership.

    Args:
        device: where the storages to be counted live; a few hundred bytes are used for a moment.

    Returns:
        The bias, the same in inference mode, no_grad and grad mode.

    Raises:
        CountError: if any kind of use leaves the counts at their idle values (so does a release of
            torch without the count), if dropping it does not bring them back, or if modes differ.
    """
    biases = {}
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with torch.inference_mode(mode is torch.inference_mode), mode():
            biases[mode.__name__] = _measure(device)
    if len(set(biases.values())) != 1:
        raise CountError(f"the idle use count depends on the mode: {biases}")
    return biases["no_grad"]


_USES: dict[str, Callable[[Tensor], object]] = {
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor.view(-1),
    "a reshape": lambda tensor: tensor.reshape(2, 8),
    "a slice": lambda tensor: tensor[1:],
    "a transpose": lambda tensor: tensor.transpose(0, 1),
    "a detached tensor": lambda tensor: tensor.detach(),
    "a view of a view": lambda tensor: tensor[1:].transpose(0, 1)[2:],
    "a storage handle": lambda tensor: tensor.untyped_storage(),
    "a DLPack capsule": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),  # type: ignore[attr-defined]
}


@dataclass(slots=True)
class _Sample:
    storage: UntypedStorage
    cdata: int


def _measure(device: torch.device) -> Bias:
    storage = torch.empty(64, dtype=torch.uint8, device=device).untyped_storage()
    sample = _Sample(storage, storage._cdata)
    del storage
    readings = [read(sample)]
    templates = []
    for _ in range(3):
        templates.append(make_template(sample.storage, (4, 4), torch.float32))
        readings.append(read(sample))
    bias = Bias(
        uses=readings[0].uses,
        uses_per_template=readings[1].uses - readings[0].uses,
        refs=readings[0].refs,
        refs_with_templates=readings[1].refs,
    )
    expected = [bias.idle(count) for count in range(4)]
    if readings != expected or bias.uses_per_template < 1:
        raise CountError(f"0 to 3 tensors on a storage read {readings}, expected {expected}")
    for name, use in _USES.items():
        _probe(name, use, sample, templates[0], expected[3])
    templates.clear()
    if read(sample) != expected[0]:
        raise CountError(f"all tensors dropped: the counts read {read(sample)}, not {expected[0]}")
    return bias


def _probe(
    name: str, use: Callable[[Tensor], object], sample: _Sample, template: Tensor, idle: Reading
) -> None:
    tensor = template.data
    if read(sample) != (idle.uses + 1, idle.refs):
        raise CountError(f"a tensor in use reads {read(sample)}, an idle storage {idle}")
    held = use(tensor)
    del tensor
    if read(sample) == idle:
        raise CountError(f"{name} in use reads {idle}, the same as an idle storage")
    del held
    if read(sample) != idle:
        raise CountError(f"{name} dropped: the counts read {read(sample)}, not {idle}")
