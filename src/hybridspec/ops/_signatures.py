"""What a contract needs to know of a tensor, as a number that is kept while the tensor lives.

Reading shape, strides, dtype and device takes as long as a small operator does, and weights and
pools are the same objects in every step.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["signatures"]

_MOST_KINDS = 4096
_fresh_numbers = itertools.count(1)
_numbers: dict[tuple[torch.Size, tuple[int, ...], torch.dtype, int], int] = {}
_known: dict[int, int] = {id(None): 0}  # by identity
_alive: dict[int, weakref.ref[Tensor]] = {}


def signatures(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Return a number for each tensor, 0 for None.

    Tensors with the same number are equal in shape, strides, dtype and device, provided that none
    of these has been changed in place.

    Raises:
        AttributeError, TypeError: if something is neither a tensor nor None.
    """
    found = tuple(map(_known.get, map(id, tensors)))
    if None in found:
        return tuple([_number(tensor) for tensor in tensors])
    return found  # type: ignore[return-value]


def _number(tensor: Tensor | None) -> int:
    identity = id(tensor)
    number = _known.get(identity)
    if number is not None or tensor is None:
        return number or 0
    kind = (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
    number = _numbers.get(kind)
    if number is None:
        if len(_numbers) >= _MOST_KINDS:
            _numbers.clear()
        number = _numbers[kind] = next(_fresh_numbers)
    if type(tensor) is Tensor:  # a parameter's contents may be replaced as a whole
        _alive[identity] = weakref.ref(tensor, functools.partial(_forget, identity))
        _known[identity] = number
    return number


def _forget(
    identity: int,
    _: weakref.ref[Tensor],
    tables: tuple[dict[int, Any], ...] = (_known, _alive),  # globals are gone when Python ends
) -> None:
    for table in tables:
        table.pop(identity, None)
