"""Drafting without a draft head: repeat what followed when the newest tokens stood before.

Costs next to nothing and needs no weights. It helps where a text takes up what it already holds:
code, summaries, answers about a document.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hybridspec.speculate.draft import Draft

__all__ = ["LookupDrafter", "look_up"]

_NUM_TOKENS = 2  # tokens that must agree for a place to count
_MAX_PLACES = 16  # places to compare, the latest ones
_MAX_AGREEMENT = 16


class LookupDrafter:
    """Drafts from the request's own tokens."""

    def propose(
        self,
        slots: Sequence[int],
        histories: Sequence[array[int]],
        num_drafts: Sequence[int],
        *,
        has_confidences: bool,
    ) -> list[Draft]:
        """Propose what followed each request's newest tokens before, nothing if they are new.

        The confidence of m agreeing tokens is m / (m + 1), for each draft.
        """
        drafts = []
        for history, count in zip(histories, num_drafts, strict=True):
            tokens, agreement = look_up(history, count)
            confidences = [agreement / (agreement + 1)] * len(tokens) if has_confidences else []
            drafts.append(Draft(tokens, confidences))
        return drafts


def look_up(history: array[int], count: int) -> tuple[list[int], int]:
    """Continue a list of tokens as it went on before.

    Of the latest places at which its last tokens stand, the one with the most agreeing tokens in
    front of it counts, and the latest of equals. What follows there is repeated if it is too short.

    Args:
        history: prompt and output so far, 32-bit integers.
        count: how many tokens to return.

    Returns:
        The tokens, none if the last ones stand nowhere else, and how many agree at that place.
    """
    size = history.itemsize
    # Bytes are searched faster than a list; a hit must lie on the border of a token.
    text = history.tobytes()
    wanted = history[-_NUM_TOKENS:].tobytes()
    best = agreement = 0
    end = len(text) - size
    for _ in range(_MAX_PLACES):
        place = text.rfind(wanted, 0, end)
        while place % size and place >= 0:
            end = place + len(wanted) - 1
            place = text.rfind(wanted, 0, end)
        if place < 0 or len(history) <= _NUM_TOKENS:
            break
        following = place // size + _NUM_TOKENS
        agreeing = _agreement(history, following)
        if agreeing > agreement:
            best, agreement = following, agreeing
        end = place + len(wanted) - 1
    if not agreement:
        return [], 0
    period = len(history) - best
    return [history[best + j % period] for j in range(count)], agreement


def _agreement(history: array[int], following: int) -> int:
    """How many tokens in front of `following` are the last ones of the history."""
    most = min(following, _MAX_AGREEMENT)
    for count in range(_NUM_TOKENS, most):
        if history[following - 1 - count] != history[-1 - count]:
            return count
    return most
