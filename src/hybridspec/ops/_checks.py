"""Shape contracts of the ops, one line each.

`check("k", k, "N H K", dims)` binds the letters to sizes the first time they are met and compares
them afterwards. The fast path is one comparison per tensor, because these checks run for every
layer of every step.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "FLOATS",
    "INTEGERS",
    "WIDE",
    "Dims",
    "check",
    "check_devices",
    "check_dtype",
    "check_last_stride",
    "check_option",
    "check_tensor",
    "dtype_name",
    "row_alignment",
]

Dims = dict[str, int]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDE = (torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as messages do, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def row_alignment(*tensors: Tensor) -> int:
    """Bytes, up to 16, that divide the addresses of all rows."""
    bits = 16
    for tensor in tensors:
        bits |= tensor.data_ptr()
        for stride in tensor.stride()[:-1]:
            bits |= stride * tensor.element_size()
    return bits & -bits


def check(name: str, tensor: Tensor, spec: str, dims: Dims) -> None:
    """Bind or compare the sizes of one tensor.

    Args:
        name: argument name used in the message.
        tensor: the tensor to look at; never modified.
        spec: one letter or number per dimension, separated by spaces.
        dims: sizes bound so far; in / out.

    Raises:
        TypeError: if `tensor` is not a tensor.
        ValueError: if the rank or a size is wrong.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor [{spec}], got {type(tensor).__name__}")
    letters = spec.split(" ")
    shape = tensor.shape
    if len(shape) == len(letters):
        for letter, size in zip(letters, shape, strict=True):
            expected = int(letter) if letter.isdigit() else dims.setdefault(letter, size)
            if expected != size:
                break
        else:
            return
    known = [letter if letter.isdigit() else str(dims.get(letter, letter)) for letter in letters]
    raise ValueError(
        f"{name}: expected shape [{', '.join(letters)}] = [{', '.join(known)}], "
        f"got {list(tensor.shape)}"
    )


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raise TypeError unless the tensor's dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        names = ", ".join(map(dtype_name, allowed))
        raise TypeError(f"{name}: expected dtype {names}, got {dtype_name(tensor.dtype)}")


def check_last_stride(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless neighbouring elements of the last dimension lie side by side."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: expected a last stride of 1, got strides {tuple(tensor.stride())}; "
            f"call .contiguous() on it"
        )


def check_tensor(name: str, tensor: Tensor, spec: str, dims: Dims, *dtypes: torch.dtype) -> None:
    """Raise as `check`, `check_dtype` and `check_last_stride` do."""
    check(name, tensor, spec, dims)
    check_dtype(name, tensor, *dtypes)
    check_last_stride(name, tensor)


def check_devices(**named: Tensor | None) -> None:
    """Raise ValueError unless all tensors are where the first one is; None is left out."""
    name, anchor = next((name, tensor) for name, tensor in named.items() if tensor is not None)
    for other, tensor in named.items():
        if tensor is not None and tensor.device != anchor.device:
            raise ValueError(
                f"{other}: expected a tensor on {anchor.device} like {name}, got one on "
                f"{tensor.device}"
            )


def check_option(
    name: str, value: Any, kind: type, *, low: int | None = None, high: int | None = None
) -> None:
    """Raise unless an option is a plain value of a kind.

    Args:
        name: argument name used in the message.
        value: what came. What counts as an integer or a number, such as NumPy's, is one.
        kind: int, float, bool or str.
        low: least value.
        high: largest value.

    Raises:
        TypeError: if `value` is of another kind.
        ValueError: if it is less than `low` or more than `high`.
    """
    if not isinstance(value, kind) and not _counts_as(value, kind):
        expected = {int: "an integer", float: "a number", bool: "True or False", str: "a text"}
        raise TypeError(f"{name}: expected {expected[kind]}, got {value!r}")
    if low is not None and value < low:
        raise ValueError(f"{name}: expected at least {low}, got {value}")
    if high is not None and value > high:
        raise ValueError(f"{name}: expected at most {high}, got {value}")


def _counts_as(value: Any, kind: type) -> bool:
    if kind is float:
        return hasattr(value, "__float__")
    try:
        return kind is int and operator.index(value) is not None
    except TypeError:
        return False
