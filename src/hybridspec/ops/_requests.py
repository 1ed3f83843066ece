"""A ragged batch, and its host-side view for backends in PyTorch.

Such a backend loops over requests in Python, so it reads the few integers that describe the batch
once per call; kernels read the same tensors on the device.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from hybridspec.ops._checks import INTEGERS, Dims, check_tensor

__all__ = [
    "Batch",
    "Request",
    "check_batch",
    "check_distinct",
    "check_lengths",
    "check_slots",
    "live_requests",
    "read_at",
    "read_batch",
]


class Batch(NamedTuple):
    """Whose the rows of a call are.

    Attributes:
        cu_seqlens: row bounds of the requests, [B+1], int32 or int64; contiguous.
        slots: slot of each request, -1 = padding, [B], int32 or int64; contiguous.
        max_rows: most rows of one request.
    """

    cu_seqlens: Tensor
    slots: Tensor
    max_rows: int


class Request(NamedTuple):
    """Packed rows `start` to `stop - 1` of one request, stored from `position` on in `slot`."""

    start: int
    stop: int
    slot: int
    position: int


def check_batch(batch: Batch, seq_len: Tensor, dims: Dims) -> None:
    """Raise unless bounds, slots and the cursor [S] fit together; binds S and B."""
    check_tensor("seq_len", seq_len, "S", dims, *INTEGERS)
    check_tensor("slots", batch.slots, "B", dims, *INTEGERS)
    check_tensor("cu_seqlens", batch.cu_seqlens, str(dims["B"] + 1), dims, *INTEGERS)


def read_at(cursor: Tensor, slots: list[int]) -> list[int]:
    """Read a cursor [S] at some slots, at a cost that many other slots do not raise."""
    if cursor.shape[0] > 16 * len(slots):
        return [int(cursor[slot]) for slot in slots]
    values = cursor.tolist()
    return [values[slot] for slot in slots]


def check_slots(name: str, slots: list[int], num_slots: int) -> None:
    """Raise ValueError if a slot, padding aside, is none of the pools'."""
    if max(slots, default=-1) >= num_slots:
        raise ValueError(f"{name}: expected slots below {num_slots}, got {slots}")


def check_distinct(slots: list[int], name: str = "slots") -> None:
    """Raise ValueError if a slot occurs twice."""
    if len(slots) > 1 and len(set(slots)) < len(slots):
        raise ValueError(f"{name}: expected no slot twice, got {slots}")


def check_lengths(name: str, longest: int, bounds: list[int]) -> None:
    """Raise ValueError if a request has more rows than an argument `name` says."""
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if stop - start > longest:
            raise ValueError(_too_short(name, longest, index, stop - start))


def _too_short(name: str, longest: int, index: int, num_rows: int) -> str:
    return (
        f"{name}: expected at least the rows of the longest request, got {longest} but request "
        f"{index} has {num_rows}"
    )


def read_batch(
    cu_seqlens: Tensor, slots: Tensor, *, num_rows: int, num_slots: int
) -> tuple[list[int], list[int]]:
    """Return row bounds and slots as numbers.

    Args:
        cu_seqlens: row bounds of the requests, [B+1]; in.
        slots: slot of each request, -1 = padding, [B]; in.
        num_rows: packed rows.
        num_slots: slots of the pools.

    Raises:
        ValueError: if a bound is no row, bounds fall, or a slot is none of the pools'.
    """
    bounds, numbers = cu_seqlens.tolist(), slots.tolist()
    check_slots("slots", numbers, num_slots)
    if bounds[0] < 0 or bounds[-1] > num_rows or sorted(bounds) != bounds:
        raise ValueError(
            f"cu_seqlens: expected bounds that rise from 0 to at most {num_rows}, got {bounds}"
        )
    return bounds, numbers


def live_requests(batch: Batch, seq_len: Tensor, *, num_rows: int, max_name: str) -> list[Request]:
    """List the requests that have a slot and at least one row, in row order.

    Args:
        batch: the requests; in.
        seq_len: positions stored so far, [S]; in.
        num_rows: packed rows.
        max_name: name of the argument that `batch.max_rows` came from, for the message.

    Raises:
        ValueError: as `read_batch`, and if a live request has more than `max_rows` rows, a
            negative position or the slot of another.
    """
    bounds, numbers = read_batch(
        batch.cu_seqlens, batch.slots, num_rows=num_rows, num_slots=seq_len.shape[0]
    )
    requests = []
    for index, slot in enumerate(numbers):
        start, stop = bounds[index], bounds[index + 1]
        if slot < 0 or start == stop:
            continue
        if stop - start > batch.max_rows:
            raise ValueError(_too_short(max_name, batch.max_rows, index, stop - start))
        [position] = read_at(seq_len, [slot])
        if position < 0:
            raise ValueError(f"seq_len: expected 0 or more in slot {slot}, got {position}")
        requests.append(Request(start, stop, slot, position))
    check_distinct([request.slot for request in requests])
    return requests
