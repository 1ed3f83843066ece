"""Connections on which the server waits for a client that does nothing.

uvicorn ends those that stay silent behind an answer, and no others: who never asks, does not end
its request or does not read its answer would hold a file, and its place in the queue, for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Stalled"]


class Stalled:
    """Ends the connections whose client did nothing between two looks."""

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[Any, int]] = {}

    def look(self, connections: Iterable[Any]) -> None:
        """End those that wait for what they waited for the last time.

        Args:
            connections: uvicorn's, all that are open.
        """
        waiting = {one: (one.cycle, _num_unread(one)) for one in connections if _waits(one)}
        for connection, what in waiting.items():
            if self._seen.get(connection) == what:
                connection.transport.abort()  # `close` would wait until everything is read
        self._seen = waiting


def _num_unread(connection: Any) -> int:
    """Bytes that the client did not take yet."""
    return int(connection.transport.get_write_buffer_size())


def _waits(connection: Any) -> bool:
    """Whether it is the client's turn: to ask, to end its request, or to read."""
    cycle, flow = connection.cycle, connection.flow
    if cycle is None or cycle.response_complete or flow.write_paused:
        return True
    return bool(cycle.more_body and not flow.read_paused)
