"""Who has which part of the sampling table, and what a request's data looks like there."""

from __future__ import annotations

import random

import pytest
import torch

from hybridspec.ops.sampling import COUNT_MASK, IN_PROMPT, SamplingTable, SamplingUses, choose
from hybridspec.runtime import SamplingPool, SlotOptions
from hybridspec.runtime.pieces import Pieces

VOCAB = 70


def pool_of(num_slots: int = 3, **sizes: int) -> SamplingPool:
    given = {"num_count_rows": 1, "num_bias": 4, "num_words": 4, "num_word_tokens": 8, **sizes}
    return SamplingPool(num_slots, VOCAB, grows=False, **given)


def tokens_of(bits: torch.Tensor) -> list[int]:
    return [token for token in range(VOCAB) if int(bits[token // 32]) >> token % 32 & 1]


def test_pieces() -> None:
    """Pieces never overlap, and all is free again at the end."""
    rng = random.Random(0)
    pieces, taken = Pieces(40), {}
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            start = rng.choice(list(taken))
            pieces.give(start, taken.pop(start))
        else:
            size = rng.randrange(1, 12)
            start = pieces.take(size)
            if start is None:
                continue
            taken[start] = size
        used = [place for start, size in taken.items() for place in range(start, start + size)]
        assert len(used) == len(set(used))
        assert max(used, default=0) < 40
    for start, size in taken.items():
        pieces.give(start, size)
    assert pieces.take(40) == 0
    pieces.grow(50)
    assert pieces.take(10) == 40


def test_columns() -> None:
    pool = pool_of()
    options = SlotOptions(
        temperature=0.75,
        top_k=2**31 - 1,
        top_p=0.5,
        min_p=0.25,
        seed=2**63 - 5,
        repetition=1.5,
        frequency=-0.5,
        presence=2.0,
        bias={3: 1.5, 69: -100.0},
        bad_words=[[5], [1, 2], [7, 8, 9]],
        ends=[31, 69, 1000],
        ends_from=17,
    )
    assert pool.write(1, options, prompt=[4, 4, 6], output=[6, 8, 8])
    table = pool.table
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "repetition", "frequency"):
        assert getattr(table, name)[1] == getattr(options, name), name
    assert (table.presence[1], table.ends_from[1]) == (2.0, 17)
    assert tokens_of(table.end_bits[1]) == [31, 69]
    assert tokens_of(table.allowed_bits[1]) == [t for t in range(VOCAB) if t != 5]
    assert table.allowed_bits[1, 2] == 0b111111
    counts = {t: c for t, c in enumerate(table.counts[0].tolist()) if c}
    assert counts == {4: IN_PROMPT, 6: IN_PROMPT + 1, 8: 2}
    assert table.bias_tokens[:2].tolist() == [3, 69]
    assert table.bias_values[:2].tolist() == [1.5, -100.0]
    assert (table.word_len[1], table.word_bounds[:3].tolist()) == (2, [0, 2, 5])
    assert table.word_tokens[:5].tolist() == [1, 2, 7, 8, 9]
    assert not pool.needs_eager(1)
    fresh = SamplingTable.create(3, VOCAB, num_count_rows=1, num_bias=4, num_words=4,
                                 num_word_tokens=8)  # fmt: skip
    for name in fresh.__slots__:
        if getattr(fresh, name).shape[0] == 3:
            for slot in (0, 2):
                assert torch.equal(getattr(table, name)[slot], getattr(fresh, name)[slot])


def test_uses() -> None:
    everything = SlotOptions(
        temperature=1, top_p=0.5, presence=1, bias={1: 1}, bad_words=[[1, 2], [3]], ends=[1],
        ends_from=4,
    )  # fmt: skip
    assert everything.uses == SamplingUses.everything()
    assert SlotOptions(top_k=5).uses == SamplingUses()
    assert SlotOptions(ends=[4]).uses == SamplingUses()
    assert SlotOptions(allowed=[4]).uses == SamplingUses(has_masks=True)
    pool = pool_of()
    pool.write(0, SlotOptions(temperature=1))
    pool.write(1, SlotOptions(presence=1))
    assert pool.uses([0, 1]) == SamplingUses(has_noise=True, has_counts=True)
    assert pool.uses([0]) == SamplingUses(has_noise=True)


@pytest.mark.parametrize(
    "options",
    [
        SlotOptions(presence=1),
        SlotOptions(bias={1: 1, 2: 1, 3: 1}),
        SlotOptions(bad_words=[[1, 2], [3, 4]]),
        SlotOptions(bad_words=[[1, 2, 3, 4, 5]]),
    ],
    ids=["counts", "bias", "words", "word tokens"],
)
def test_waits_for_room(options: SlotOptions) -> None:
    pool = pool_of()
    everything = SlotOptions(presence=1, bias=options.bias, bad_words=options.bad_words)
    assert pool.write(0, options)
    assert not pool.write(1, everything)
    assert pool.write(2, SlotOptions(temperature=1))
    pool.release(0)
    assert pool.write(1, everything)
    assert not pool.needs_eager(1)
    with pytest.raises(ValueError, match="slot: expected one that holds nothing, got 1"):
        pool.write(1, options)


def test_counts_of_a_row_that_was_used() -> None:
    pool = pool_of()
    pool.write(0, SlotOptions(presence=1), prompt=[1], output=[2])
    pool.release(0)
    pool.write(1, SlotOptions(presence=1), output=[3] * (COUNT_MASK + 2))
    assert pool.table.counts[0].nonzero().tolist() == [[3]]
    assert pool.table.counts[0, 3] == COUNT_MASK


def chosen(pool: SamplingPool, tokens: list[int], logits: torch.Tensor) -> int:
    """Choose behind some tokens for slot 0, with a waiting step if it needs one."""
    mask = pool.overflow(logits, [(0, tokens), (-1, [])]) if pool.needs_eager(0) else None
    log = torch.tensor([tokens], dtype=torch.int32)
    ints = {"dtype": torch.int32}
    found = choose(
        logits, torch.tensor([0, -1], **ints), torch.zeros(2, **ints), pool.table,
        torch.full((pool.table.seed.shape[0],), len(tokens) - 1, **ints),
        torch.zeros(pool.table.seed.shape[0], 0, dtype=torch.int64), log,
        torch.zeros(pool.table.seed.shape[0], 1, **ints), mask=mask, uses=pool.uses([0]),
    )  # fmt: skip
    return int(found[0])


@pytest.mark.parametrize("seed", range(8))
def test_what_is_too_large_is_served(seed: int) -> None:
    """A pool that can hold nothing gives the tokens of one that holds everything."""
    rng = random.Random(seed)
    words = [[rng.randrange(4) for _ in range(rng.choice([2, 3, 70]))] for _ in range(60)]
    options = SlotOptions(
        temperature=0.5 * (seed % 2),
        repetition=1.3,
        bias={token: rng.choice([-3.0, 2.0]) for token in range(0, VOCAB, 2)},
        bad_words=[*words, [31], [30, 31]],
    )
    large = SamplingPool(1, VOCAB)
    small = pool_of(1)
    texts = [[rng.randrange(4) for _ in range(75)] for _ in range(10)] + [[3] + w for w in words]
    assert large.write(0, options) and small.write(0, options)
    assert small.needs_eager(0) and not large.needs_eager(0)
    assert not small.uses([0]).has_bias
    for text in texts[:40]:
        logits = torch.randn(2, VOCAB)
        logits[:, :4] += 4
        assert chosen(small, text[:-1], logits.clone()) == chosen(large, text[:-1], logits)


def test_growth_keeps_data() -> None:
    pool = SamplingPool(1, VOCAB, num_bias=1, num_words=2, num_word_tokens=2)
    options = SlotOptions(presence=1, bias={1: 1, 2: 1, 3: 2}, bad_words=[[1, 2, 3], [4, 5]])
    size = pool.nbytes
    assert pool.write(0, options, output=[7])
    before = [tensor.clone() for tensor in pool.table.tensors()]
    pool.resize(3)
    assert all(pool.write(slot, options, output=[8]) for slot in (1, 2))
    assert pool.nbytes > size
    for old, new in zip(before, pool.table.tensors(), strict=True):
        piece = new[tuple(slice(0, size) for size in old.shape)]
        assert torch.equal(piece[: old.shape[0]], old) or old.shape[0] > 1
    assert pool.table.count_row.tolist() == [0, 1, 2]
    assert pool.table.bias_len.tolist() == [3, 3, 3]
    for slot in range(3):
        start = int(pool.table.bias_start[slot])
        assert pool.table.bias_tokens[start : start + 3].tolist() == [1, 2, 3]
        first = int(pool.table.word_bounds[pool.table.word_start[slot]])
        assert pool.table.word_tokens[first : first + 5].tolist() == [1, 2, 3, 4, 5]
