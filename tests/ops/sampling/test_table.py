"""Counts that move with the commit, and which tokens end a request."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hybridspec.ops.sampling import COUNT_MASK, IN_PROMPT, SamplingTable, count_tokens, is_end

VOCAB = 70


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_bits_past_the_vocabulary_are_zero() -> None:
    table = SamplingTable.create(2, VOCAB)
    assert table.allowed_bits.tolist() == [[-1, -1, 0b111111]] * 2
    assert SamplingTable.create(1, 64).allowed_bits.tolist() == [[-1, -1]]
    again = SamplingTable.of(table.tensors())
    assert all(a is b for a, b in zip(again.tensors(), table.tensors(), strict=True))


def test_counts_move() -> None:
    table = SamplingTable.create(4, VOCAB, num_count_rows=3)
    table.count_row.copy_(ints([2, -1, 0, 1]))
    table.counts.fill_(-1)
    table.counts[0].zero_()
    table.counts[0, 5] = IN_PROMPT
    table.counts[2].zero_()
    before = table.counts.clone()
    tokens = torch.tensor([[5, 5, 9, 5], [1, 2, 3, 4], [69, 0, 0, 69], [7, 8, 7, 8]])
    count_tokens(table, ints([2, 1, 0, -1]), tokens, ints([3, 4, 4, 4]))
    assert Counter(dict(enumerate(table.counts[2].tolist()))) == Counter({69: 2, 0: 2})
    assert table.counts[0, 5] == IN_PROMPT + 2
    assert table.counts[0, 9] == 1
    assert table.counts[0].count_nonzero() == 2
    assert torch.equal(table.counts[1], before[1])
    count_tokens(table, ints([2, 0]), tokens[:2], ints([0, 0]))
    count_tokens(table, ints([-1, -1]), tokens[:2], ints([4, 4]))
    count_tokens(table, ints([2]), ints([-1, 9], torch.int64)[None], ints([2]))
    assert table.counts[0, 9] == 2
    assert table.counts[0].count_nonzero() == 2


@pytest.mark.parametrize("sign", [0, IN_PROMPT])
def test_counts_stop_at_the_largest(sign: int) -> None:
    table = SamplingTable.create(1, VOCAB)
    table.count_row.zero_()
    table.counts[0, 3] = sign + COUNT_MASK - 2
    count_tokens(table, ints([0]), torch.full((1, 5), 3), ints([5]))
    assert table.counts[0, 3] == sign + COUNT_MASK
    count_tokens(table, ints([0]), torch.full((1, 5), 3), ints([5]))
    assert table.counts[0, 3] == sign + COUNT_MASK
    assert table.counts.count_nonzero() == 1


def test_ends() -> None:
    table = SamplingTable.create(3, VOCAB)
    table.ends_from.copy_(ints([0, 10, 0]))
    for token in (3, 31, 32, 69):
        bit = 1 << token % 32
        table.end_bits[:2, token // 32] |= bit if bit < 2**31 else bit - 2**32
    tokens = torch.arange(-1, VOCAB)
    ends = {3, 31, 32, 69}
    for slot, position, expected in ((0, 5, ends), (1, 9, set()), (1, 10, ends), (2, 5, set())):
        found = is_end(table, ints([slot]), ints([position]), tokens)
        assert set(tokens[found].tolist()) == expected
    slots, positions = ints([1, 1, -1])[:, None], ints([9, 10])[None]
    found = is_end(table, slots, positions, ints([31], torch.int64))
    assert found.tolist() == [[False, True], [False, True], [False, False]]
