"""Bias, penalties and bad words against loops over tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.speculate import ChoiceRule, LogitEdits, choose_tokens, edit_logits

VOCAB = 23


def by_hand(row: list[float], prompt: list[int], said: list[int], options: dict) -> list[float]:
    """One row in fp64, one token at a time; forbidden tokens become -inf."""
    scores = []
    for token, score in enumerate(row):
        score += options.get("bias", {}).get(token, 0.0)
        factor = options.get("repetition", 1.0)
        if token in prompt or token in said:
            score = score / factor if score > 0 else score * factor
        for other in said:
            score -= options.get("frequency", 0.0) * (other == token)
        scores.append(score - options.get("presence", 0.0) * (token in said))
    prefix = prompt + said
    for *before, last in options.get("bad_words", ()):
        if prefix[len(prefix) - len(before) :] == before and len(before) <= len(prefix):
            scores[last] = -float("inf")
    return scores


def random_options(rng: random.Random) -> dict[str, Any]:
    kinds = {
        "repetition": lambda: rng.uniform(0.5, 2),
        "frequency": lambda: rng.uniform(-2, 2),
        "presence": lambda: rng.uniform(-2, 2),
        "bias": lambda: {rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(3)},
        "bad_words": lambda: [
            tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 2, 2, 3])))
            for _ in range(60)
        ],
    }
    return {name: make() for name, make in kinds.items() if rng.random() < 0.5}


@settings(derandomize=True, max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_batch_of_requests_over_several_steps(seed: int) -> None:
    """Rows with and without options, drafts pending, histories that grow between steps."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for _ in range(rng.randrange(1, 5)):
        options = random_options(rng)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 8))]
        requests.append((options, prompt, [], LogitEdits(prompt, **options) if options else None))
    for _ in range(3):
        edits, pending, expected = [], [], []
        rows = [rng.randrange(1, 5) for _ in requests]
        logits = 3 * torch.randn(sum(rows), VOCAB, generator=generator)
        original = logits.clone()
        for (options, prompt, said, mine), count in zip(requests, rows, strict=True):
            drafts = [rng.randrange(VOCAB) for _ in range(count - 1)]
            for ahead in range(count):
                row = original[len(expected)].tolist()
                expected.append(by_hand(row, prompt, said + drafts[:ahead], options))
                edits.append(mine)
                pending.append(drafts[:ahead])
        for row, token in edit_logits(logits, edits, pending):
            logits[row, token] = -torch.inf
        torch.testing.assert_close(
            logits.double(), torch.tensor(expected, dtype=torch.float64), rtol=2e-6, atol=2e-6
        )
        for row, mine in enumerate(edits):
            if mine is None:
                assert torch.equal(logits[row], original[row])
            else:  # the same bits as in a batch of its own
                alone = original[row : row + 1].clone()
                for _, token in edit_logits(alone, [mine], [pending[row]]):
                    alone[0, token] = -torch.inf
                assert torch.equal(alone[0], logits[row])
        for _, _, said, mine in requests:
            new = [rng.randrange(VOCAB) for _ in range(rng.randrange(4))]
            said += new
            if mine is not None:
                mine.extend(new)


def test_a_number_by_hand() -> None:
    edits = LogitEdits([0, 1], repetition=2.0, frequency=0.5, presence=0.25, bias={2: 1.0, 0: -3.0})
    edits.extend([2, 2])
    logits = torch.tensor([[2.0, 4.0, 3.0, 5.0, 6.0]])
    assert edit_logits(logits, [edits], [[3]]) == []
    # (2-3)*2, 4/2, (3+1)/2 - 0.5*2 - 0.25, 5/2 - 0.5 - 0.25, 6
    assert logits.tolist() == [[-2.0, 2.0, 0.75, 1.75, 6.0]]


@pytest.mark.parametrize(
    ("prompt", "pending", "forbidden"),
    [
        ([7], [], {9}),
        ([1], [], {9, 2}),
        ([5, 1], [2], {9, 3}),
        ([5, 1], [2, 1], {9, 2}),
        ([1, 2], [], {9, 3}),
        ([2], [], {9}),
        ([1, 2], [3], {9, 4}),
        ([1], [2, 3], {9, 4}),
    ],
)
def test_a_bad_word_is_begun(prompt: list[int], pending: list[int], forbidden: set[int]) -> None:
    edits = LogitEdits(prompt, bad_words=[(9,), (1, 2), (1, 2, 3), (1, 2, 3, 4)])
    assert set(edits.forbidden_after(pending)) == forbidden


def test_what_is_forbidden_is_not_chosen() -> None:
    rule = ChoiceRule(
        temperature=0, top_k=0, top_p=1, min_p=0, seed=0, forbidden=(2,), forbidden_until=5,
        edits=LogitEdits([1], bad_words=[(1, 3)], bias={3: 100.0}),
    )  # fmt: skip
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0]] * 3)
    chosen = choose_tokens(logits, [rule] * 3, [4, 5, 5], [[], [], [0]])
    assert chosen.tolist() == [1, 2, 3]


def test_a_loop_that_forgets_the_prompt_is_seen() -> None:
    """Teeth of the loop above."""
    row = [1.0] * VOCAB
    options = {"repetition": 2.0}
    edits = LogitEdits([4], **options)
    logits = torch.tensor([row])
    edit_logits(logits, [edits], [[]])
    assert logits[0].tolist() == by_hand(row, [4], [], options)
    assert logits[0].tolist() != by_hand(row, [5], [], options)
