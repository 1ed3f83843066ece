"""Pieces of a flat array that are given out and taken back."""

from __future__ import annotations

from bisect import insort

__all__ = ["Pieces"]


class Pieces:
    """Who has which piece of an array; the first gap that is large enough is taken.

    Args:
        size: how long the array is.

    Attributes:
        size: the same, after growth.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]  # (start, size), by start; neighbours are joined

    def take(self, size: int) -> int | None:
        """Take so many entries and return where they begin, or None if no gap is so large."""
        for place, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[place : place + 1] = [(start + size, room - size)] * (room > size)
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Take back a piece."""
        insort(self._free, (start, size))
        joined: list[tuple[int, int]] = []
        for begin, room in self._free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((begin, room))
        self._free = joined

    def grow(self, size: int) -> None:
        """Make the array longer, at its end."""
        self.give(self.size, size - self.size)
        self.size = size
