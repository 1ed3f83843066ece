"""Acceptance is the longest common prefix and one more token."""

from __future__ import annotations

import itertools

from hybridspec.speculate import accept_prefix


def test_every_pattern_of_right_and_wrong() -> None:
    for count in range(8):
        chosen = list(range(10, 11 + count))
        for pattern in itertools.product([True, False], repeat=count):
            drafts = [token if right else 99 for token, right in zip(chosen, pattern, strict=False)]
            accepted = pattern.index(False) if False in pattern else count
            assert accept_prefix(chosen, drafts) == chosen[: accepted + 1]
