"""The definition, on a list of tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["continue_tokens"]


def continue_tokens(
    tokens: Sequence[int], count: int, num_tokens: int, max_places: int, max_agreement: int
) -> tuple[list[int], int]:
    """Return `count` tokens, or none, and how many agree at the place that they come from."""
    end = len(tokens)
    wanted = list(tokens[-num_tokens:])
    places = [p for p in range(num_tokens, end) if list(tokens[p - num_tokens : p]) == wanted]
    best = agreement = 0
    for place in reversed(places[-max_places:]):
        agreeing = 0
        while (
            agreeing < min(place, max_agreement)
            and tokens[place - 1 - agreeing] == tokens[end - 1 - agreeing]
        ):
            agreeing += 1
        if agreeing > agreement:
            best, agreement = place, agreeing
    if not agreement:
        return [], 0
    return [tokens[best + j % (end - best)] for j in range(count)], agreement
