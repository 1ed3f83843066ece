"""Which drafts stand: the longest prefix that equals what the target chose."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["accept_prefix"]


def accept_prefix(chosen: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Return the tokens to commit: the accepted drafts and one recovered or bonus token.

    Row j's chosen token is the target's for the place of draft j. It does not depend on the drafts
    that turn out wrong later, so everything up to the first difference is the plain output. It may
    be NO_TOKEN, which no draft equals.

    Args:
        chosen: the target's tokens, one per row, len(drafts) + 1 of them.
        drafts: what was proposed for the places of all rows but the last.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
        accepted += 1
    return list(chosen[: accepted + 1])
