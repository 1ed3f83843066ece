"""A continuation's text, which takes one token at a time whatever a step committed at once.

So neither text nor end depends on how tokens were split into steps; what is handed out at a time is
cut afterwards, by `take`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridspec.models import Detokenizer

__all__ = ["Text"]


class Text:
    """Makes text of tokens, ends it at a stop string, and holds back what may begin one.

    Args:
        detokenizer: makes text of a token.
        stops: strings that end the text.
        keeps_stop: whether the text keeps the one that ended it.

    Attributes:
        num_chars: characters that are certain to stay.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, keeps_stop: bool = False
    ) -> None:
        self.num_chars = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._certain: list[str] = []  # in pieces, so that a long text is not copied for each
        self._num_taken = 0  # of the pieces
        self._tail = ""  # the longest end of the text that begins a stop string

    @property
    def has_stops(self) -> bool:
        """Whether strings end the text."""
        return bool(self._stops)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the text of tokens where no string ends it."""
        assert not self._stops
        self._release(self._detokenizer.push(tokens))

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Add a token's text.

        Args:
            token: the token.
            may_stop: whether a stop string counts that ends in this token's text.

        Returns:
            The stop string that ended the text, the first to begin if there are several, or None.
        """
        return self._add(self._detokenizer.push([token]), may_stop)

    def finish(self, *, may_stop: bool = True) -> str | None:
        """End the text: add what waits for a character's last bytes; as `push`."""
        found = self._add(self._detokenizer.finish(), may_stop)
        self._release(self._tail)
        self._tail = ""
        return found

    def take(self) -> str:
        """Return the text that became certain since the last call."""
        text = "".join(self._certain[self._num_taken :])
        self._certain[self._num_taken :] = [text] if text else []
        self._num_taken = len(self._certain)
        return text

    def first(self, num_chars: int) -> str:
        """Return the first characters of the text, at most all that is certain."""
        return "".join(self._certain)[:num_chars]

    def _add(self, piece: str, may_stop: bool) -> str | None:
        if not piece or not self._stops:
            self._release(piece)
            return None
        before, text = len(self._tail), self._tail + piece
        if may_stop:
            # What ends in earlier text was passed over when it was added.
            places = [(text.find(s, max(before - len(s) + 1, 0)), s) for s in self._stops]
            found = min(
                (one for one in places if one[0] >= 0), key=lambda one: one[0], default=None
            )
            if found is not None:
                start, stop = found
                self._release(text[: start + len(stop)] if self._keeps_stop else text[:start])
                self._tail = ""
                return stop
        num_held = self._num_held(text)
        self._release(text[: len(text) - num_held])
        self._tail = text[len(text) - num_held :]
        return None

    def _release(self, text: str) -> None:
        if text:
            self._certain.append(text)
            self.num_chars += len(text)

    def _num_held(self, text: str) -> int:
        """Characters at the end of the text that may turn out to begin a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
