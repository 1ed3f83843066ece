"""Host-side view of a ragged batch, for PyTorch references.

A reference loops over requests in Python, so it reads the few integers that describe the batch once
per call; kernels read the same tensors on the device.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Request", "live_requests", "read_at"]


class Request(NamedTuple):
    """Packed rows `start` to `stop - 1` of one request, stored from `position` on in `slot`."""

    start: int
    stop: int
    slot: int
    position: int


def read_at(cursor: Tensor, slots: list[int]) -> list[int]:
    """Read a cursor [S] at some slots, at a cost that many other slots do not raise."""
    if cursor.shape[0] > 16 * len(slots):
        return [int(cursor[slot]) for slot in slots]
    values = cursor.tolist()
    return [values[slot] for slot in slots]


def live_requests(
    cu_seqlens: Tensor, slots: Tensor, seq_len: Tensor, *, max_rows: int, max_name: str
) -> list[Request]:
    """List the requests that have a slot and at least one row, in row order.

    Args:
        cu_seqlens: row bounds of the requests, [B+1]; in.
        slots: slot of each request, -1 = padding, [B]; in.
        seq_len: positions stored so far, [S]; in.
        max_rows: most rows that one request may have.
        max_name: name of the argument that `max_rows` came from, for the message.

    Raises:
        ValueError: if a live request has more than `max_rows` rows.
    """
    bounds = cu_seqlens.tolist()
    requests = []
    for index, slot in enumerate(slots.tolist()):
        start, stop = bounds[index], bounds[index + 1]
        if slot < 0 or start >= stop:
            continue
        if stop - start > max_rows:
            raise ValueError(
                f"{max_name}: expected at least the rows of the longest request, got {max_rows} "
                f"but request {index} has {stop - start}"
            )
        [position] = read_at(seq_len, [slot])
        requests.append(Request(start, stop, slot, position))
    return requests
