"""The definition of what a step commits, one request at a time, in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["accept_one"]


def accept_one(
    chosen: Sequence[int],
    drafts: Sequence[int],
    first_position: int,
    last_position: int,
    is_end: Callable[[int, int], bool],
) -> tuple[list[int], int, int]:
    """Return the tokens to commit, how many drafts are right, and why the request is done.

    Args:
        chosen: the target's token of each row; row j was fed draft j (row 0: the newest token).
        drafts: what was fed to rows 1, 2, ...
        first_position: position of the first chosen token.
        last_position: last position that a token may take.
        is_end: whether a token at a position ends the request.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
        accepted += 1
    committed: list[int] = []
    for position, token in enumerate(chosen[: accepted + 1], start=first_position):
        if token < 0:  # NaN logits choose no token
            return committed, accepted, 3
        committed.append(token)
        if is_end(position, token):
            return committed, accepted, 1
        if position == last_position:
            return committed, accepted, 2
    return committed, accepted, 0
