"""Data classes whose fields are tensors that an op takes one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self

from torch import Tensor

__all__ = ["Columns"]


class Columns:
    """Base of a data class with slots, all of whose fields are tensors."""

    __slots__: ClassVar[tuple[str, ...]] = ()

    def tensors(self) -> list[Tensor]:
        """List the tensors in the order of the fields, as the registered op takes them."""
        return [getattr(self, name) for name in self.__slots__]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Self:
        """Name the tensors that `tensors` listed."""
        return cls(**dict(zip(cls.__slots__, tensors, strict=True)))
