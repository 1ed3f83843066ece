"""Host-side view of a ragged batch, for the PyTorch references.

The references loop over requests in Python, so they read the few integers that describe the batch
once per call; kernels read the same tensors on the device.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Request", "live_requests"]


class Request(NamedTuple):
    """Packed rows `start:stop` of one request that owns `slot` and begins at `position`."""

    start: int
    stop: int
    slot: int
    position: int


def live_requests(
    cu_seqlens: Tensor, slots: Tensor, seq_len: Tensor, *, max_rows: int, max_name: str
) -> tuple[list[Request], int]:
    """List the requests that have rows and a slot, and count the rows they own.

    Args:
        cu_seqlens: row bounds of the requests, [B+1]; in.
        slots: slot of each request, -1 = padding, [B]; in.
        seq_len: tokens stored so far, [S]; in.
        max_rows: most rows that one request may have.
        max_name: name of the argument that `max_rows` came from, for the message.

    Returns:
        The live requests in row order and the number of packed rows that belong to them.

    Raises:
        ValueError: if a request has more than `max_rows` rows.
    """
    bounds = cu_seqlens.tolist()
    requests = []
    num_rows = 0
    for index, slot in enumerate(slots.tolist()):
        start, stop = bounds[index], bounds[index + 1]
        if slot < 0 or start >= stop:
            continue
        if stop - start > max_rows:
            raise ValueError(
                f"{max_name}: expected at least the longest request, got {max_rows} but request "
                f"{index} has {stop - start} rows"
            )
        requests.append(Request(start, stop, slot, seq_len[slot].item()))
        num_rows += stop - start
    return requests, num_rows
