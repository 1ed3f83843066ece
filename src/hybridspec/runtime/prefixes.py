"""Prefix caching: prefixes of prompts that are kept, so that other requests need not compute them.

A prefix ends at the border of a page. What is kept of it are its pages, held by many at a time and
never written again, and the recurrent states behind its last token, copied into a slot of their
own.

A key stands for the tokens of a prefix *and the one after it*: the draft head's last row of the
last page is made with that token, so a prefix is shared only where it is the same.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Prefix", "Prefixes", "prefix_keys"]


def prefix_keys(tokens: array[int], page_size: int) -> list[bytes]:
    """Return the key of each prefix that leaves a token, the shortest first.

    Args:
        tokens: of a request.
        page_size: tokens of a page.
    """
    keys: list[bytes] = []
    key = tokens[:1].tobytes()
    for first in range(1, len(tokens) - page_size + 1, page_size):
        page = tokens[first : first + page_size].tobytes()
        key = hashlib.blake2b(key + page, digest_size=20).digest()
        keys.append(key)
    return keys


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is kept of a prefix: the slot with its states and cursors, and its pages in order."""

    slot: int
    pages: tuple[int, ...]


@dataclass(slots=True)
class Prefixes:
    """The prefixes that are kept, and those that prompts in progress will bring.

    Attributes:
        num_states: most prefixes; the one not used for longest goes first. 0: none is kept.
    """

    num_states: int = 0
    _kept: OrderedDict[bytes, Prefix] = field(init=False, default_factory=OrderedDict)
    _expected: dict[bytes, int] = field(init=False, default_factory=dict)  # by which slot

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def find(self, keys: Sequence[bytes]) -> Prefix | None:
        """Return the longest prefix of a request that is kept, and note that it is used."""
        for key in reversed(keys):
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        return None

    def is_expected(self, keys: Sequence[bytes]) -> bool:
        """Whether a prompt in progress will bring a longer prefix of a request than those kept."""
        if self._expected:
            for key in reversed(keys):
                if key in self._kept:
                    return False
                if key in self._expected:
                    return True
        return False

    def expect(self, keys: Sequence[bytes], slot: int) -> None:
        """Note which prefixes the prompt in a slot will bring."""
        for key in keys:
            self._expected.setdefault(key, slot)

    def expect_no_more(self, key: bytes) -> None:
        """Note that a prompt is past the end of a prefix, whether that is kept or not."""
        self._expected.pop(key, None)

    def forget(self, slot: int) -> None:
        """Expect nothing of a slot any more."""
        for key in [key for key, one in self._expected.items() if one == slot]:
            del self._expected[key]

    def add(self, key: bytes, prefix: Prefix) -> None:
        """Keep a prefix."""
        self._kept[key] = prefix

    def pop(self) -> Prefix | None:
        """Give up the prefix that was not used for longest; None if there is none."""
        return self._kept.popitem(last=False)[1] if self._kept else None
