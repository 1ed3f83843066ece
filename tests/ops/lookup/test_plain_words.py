"""Prompt lookup against a search in plain words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.lookup_cases import to_pages
from hybridspec.ops.lookup import look_up


def expected(history: list[int], count: int) -> tuple[list[int], int]:
    """Compare every earlier place with the end, the latest first."""
    best, agreement = 0, 0
    places = [
        place
        for place in range(len(history) - 1, 1, -1)  # the first token behind the agreeing ones
        if history[place - 2 : place] == history[-2:]
    ]
    for place in places[:16]:
        agreeing = 0
        while agreeing < min(place, 16) and history[place - 1 - agreeing] == history[-1 - agreeing]:
            agreeing += 1
        if agreeing > agreement:
            best, agreement = place, agreeing
    if not agreement:
        return [], 0
    longer = list(history)
    for _ in range(count):
        longer.append(longer[len(longer) - (len(history) - best)])
    return longer[len(history) :], agreement


def one(history: list[int], count: int) -> tuple[list[int], int]:
    """Look up in the log of one request."""
    slots = torch.zeros(1, dtype=torch.int32)
    drafts, num, agreement = look_up(*to_pages([history], 4), slots, count=count)
    return drafts[0, : int(num[0])].tolist(), int(agreement[0])


@settings(derandomize=True, max_examples=400, deadline=None)
@given(
    history=st.lists(st.sampled_from([0, 1, 2, 256, 65536, 2**31 - 1]), min_size=1, max_size=60),
    count=st.integers(1, 7),
)
@example(history=[7] * 60, count=7)
@example(history=[256, 1, 65536, 256, 1], count=3)
def test_equals_the_search_in_plain_words(history: list[int], count: int) -> None:
    assert one(history, count) == expected(history, count)


@pytest.mark.parametrize(
    ("history", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], [4, 1, 2]),  # the latest place
        ([5, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2], [3, 9, 1]),  # the place that agrees longest
        ([1, 2, 1, 2], [1, 2, 1]),  # repeated where it is too short
        ([1, 2, 3, 4], []),
        ([1, 2], []),
        ([1], []),
        ([256, 0, 1, 1, 0, 0], []),  # the bytes of 0 0 lie across other tokens, not on a border
    ],
)
def test_by_hand(history: list[int], drafts: list[int]) -> None:
    assert one(history, 3)[0] == drafts
