"""Acceptance: counts against loops, distributions by statistics, and acceptors that are wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.chi_square import chi_square_p_value
from helpers.plain_choice import choose_plain
from helpers.rejection_sampling import accept_drafts, rejection_sample
from hybridspec.ops.sampling import gumbel_noise

lengths_and_rows = st.lists(st.integers(0, 5), min_size=1, max_size=6).flatmap(
    lambda lengths: st.tuples(
        st.just(lengths),
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 2)),
            min_size=sum(lengths) + 2,
            max_size=sum(lengths) + 2,
        ),
        st.integers(0, 2),
    )
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(case=lengths_and_rows)
def test_counts_equal_a_loop(case: tuple[list[int], list[tuple[int, int]], int]) -> None:
    lengths, rows, padding = case
    rows = rows[: sum(lengths) + padding]
    sampled = torch.tensor([r[0] for r in rows], dtype=torch.int64)
    drafts = torch.tensor([r[1] for r in rows], dtype=torch.int64)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    expected = []
    for b, length in enumerate(lengths):
        count, start = 0, int(bounds[b])
        while count + 1 < length and rows[start + count + 1][1] == rows[start + count][0]:
            count += 1
        expected.append(count)
    counts = accept_drafts(sampled, drafts, bounds)
    assert counts.dtype == torch.int32
    assert counts.tolist() == expected


def test_reject_at_every_position() -> None:
    sampled = torch.arange(10, 14)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    right = torch.tensor([0, 10, 11, 12])
    assert accept_drafts(sampled, right, bounds).tolist() == [3]
    for wrong in range(1, 4):
        drafts = right.clone()
        drafts[wrong] = 99
        assert accept_drafts(sampled, drafts, bounds).tolist() == [wrong - 1]
    # The first row holds a committed token: it cannot be rejected.
    assert accept_drafts(sampled, right.index_fill(0, torch.tensor([0]), 99), bounds).item() == 3


TARGET = torch.tensor([0.35, 0.25, 0.15, 0.1, 0.1, 0.05])
DRAFT = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.05, 0.15])
COUNT = 20_000


def decode(drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Verify the drafts [COUNT, T] of requests with seeds 0..COUNT-1 in one step.

    Returns the committed tokens, -1 behind the first rejection, and what plain decoding of each
    position gives, both [COUNT, T].
    """
    num_rows = drafts.shape[1]
    seeds = torch.arange(COUNT).repeat_interleave(num_rows)
    logits = TARGET.log().expand(len(seeds), 6)
    positions = torch.arange(num_rows).repeat(COUNT) + 1
    plain = choose_plain(logits, torch.ones(len(seeds)), seeds=seeds, positions=positions)
    bounds = torch.arange(COUNT + 1, dtype=torch.int32) * num_rows
    accepted = accept_drafts(plain, drafts.flatten(), bounds).long()[:, None]
    plain = plain.view(COUNT, num_rows)
    committed = drafts.roll(-1, 1).scatter(1, accepted, plain.gather(1, accepted))
    return committed.masked_fill(torch.arange(num_rows) > accepted, -1), plain


def test_output_does_not_depend_on_the_drafter() -> None:
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 6, (COUNT, 3), generator=generator)
    likely = torch.zeros(COUNT, 3, dtype=torch.int64)
    for drafts in (random, likely):
        committed, plain = decode(drafts)
        is_committed = committed >= 0
        assert torch.equal(committed[is_committed], plain[is_committed])
        assert is_committed.sum() > 1.1 * COUNT
        for position in range(3):
            counts = committed[:, position][is_committed[:, position]].bincount(minlength=6)
            assert chi_square_p_value(counts, TARGET) > 1e-3


def test_a_drafter_with_the_same_noise_agrees_often() -> None:
    seeds, ones = torch.arange(COUNT), torch.ones(COUNT)

    def choose(probs: Tensor, seeds: Tensor) -> Tensor:
        return choose_plain(probs.log().expand(COUNT, 6), ones, seeds=seeds, positions=ones)

    target, draft = choose(TARGET, seeds), choose(DRAFT, seeds)
    other = choose(DRAFT, seeds.roll(1))
    with_noise, without = (target == draft).float().mean(), (target == other).float().mean()
    assert with_noise > without + 0.2


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(probs, COUNT, replacement=True, generator=generator)


def one_draft_each(drafts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """First committed token of COUNT requests with one draft each, and whether it was accepted."""
    tokens = torch.stack((torch.zeros_like(drafts), drafts), 1).flatten()
    bounds = torch.arange(COUNT + 1, dtype=torch.int32) * 2
    accepted, following = rejection_sample(
        TARGET.expand(2 * COUNT, 6),
        DRAFT.expand(2 * COUNT, 6),
        tokens,
        bounds,
        torch.rand(2 * COUNT, generator=generator),
        gumbel_noise(torch.arange(2 * COUNT), torch.arange(2 * COUNT), 6),
    )
    return torch.where(accepted > 0, drafts, following), accepted


def test_rejection_sampling_gives_the_target_distribution() -> None:
    generator = torch.Generator().manual_seed(1)
    drafts = draw(DRAFT, generator)
    tokens, accepted = one_draft_each(drafts, generator)
    assert chi_square_p_value(tokens.bincount(minlength=6), TARGET) > 1e-3
    # The expected rate of acceptance is the overlap of the two distributions.
    overlap = torch.minimum(TARGET, DRAFT).sum().item()
    assert accepted.float().mean().item() == pytest.approx(overlap, abs=0.015)


def test_the_token_after_accepted_drafts() -> None:
    generator = torch.Generator().manual_seed(2)
    drafts = draw(TARGET, generator)
    tokens = torch.stack((torch.zeros_like(drafts), drafts), 1).flatten()
    accepted, following = rejection_sample(
        TARGET.expand(2 * COUNT, 6),
        TARGET.expand(2 * COUNT, 6),
        tokens,
        torch.arange(COUNT + 1, dtype=torch.int32) * 2,
        torch.rand(2 * COUNT, generator=generator),
        gumbel_noise(torch.arange(2 * COUNT), torch.arange(2 * COUNT), 6),
    )
    assert accepted.eq(1).all()
    assert chi_square_p_value(following.bincount(minlength=6), TARGET) > 1e-3


def test_wrong_acceptors_are_seen() -> None:
    generator = torch.Generator().manual_seed(3)
    drafts = draw(DRAFT, generator)
    always = drafts
    uniforms = torch.rand(COUNT, generator=generator)
    # Accepts rightly, but resamples from p instead of from the residual.
    is_accepted = uniforms * DRAFT[drafts] < TARGET[drafts]
    resampled = torch.where(is_accepted, drafts, draw(TARGET, generator))
    for tokens in (always, resampled):
        assert chi_square_p_value(tokens.bincount(minlength=6), TARGET) < 1e-9


def test_choosing_rows_by_the_drafted_token_biases_rejection_sampling() -> None:
    """Why the engine does not use it: rows are chosen by the confidence of the drafted token."""
    generator = torch.Generator().manual_seed(4)
    drafts = draw(DRAFT, generator)
    verified, _ = one_draft_each(drafts, generator)
    plain = draw(TARGET, generator)
    tokens = torch.where(DRAFT[drafts] >= 0.2, verified, plain)
    assert chi_square_p_value(tokens.bincount(minlength=6), TARGET) < 1e-9
    # Drafter-invariant acceptance under the same choice of rows: the token is a function of the
    # noise alone, so leaving the draft out changes nothing.
    with_draft = decode(torch.stack((torch.zeros_like(drafts), drafts), 1))[0][:, 0]
    without = decode(torch.full((COUNT, 2), -2))[0][:, 0]
    chosen = torch.where(DRAFT[drafts] >= 0.2, with_draft, without)
    assert chi_square_p_value(chosen.bincount(minlength=6), TARGET) > 1e-3


def test_rejection_sampling_of_ragged_requests() -> None:
    vocab, bounds = 4, torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32)
    target = torch.nn.functional.one_hot(torch.tensor([1, 2, 3, 0, 1, 1, 0]), vocab).float()
    draft = torch.full((7, vocab), 0.25)
    drafts = torch.tensor([0, 1, 2, 0, 0, 3, 3])
    noise = gumbel_noise(torch.arange(7), torch.arange(7), vocab)
    accepted, following = rejection_sample(
        target, draft, drafts, bounds, torch.full((7,), 0.5), noise
    )
    assert accepted.tolist() == [2, 0, 0, 0]
    assert following.tolist() == [3, -1, 0, 1]


def test_rejection_sampling_never_takes_what_the_target_excludes() -> None:
    target = torch.tensor([[0.0, 1.0]]).expand(2, 2)
    draft = torch.tensor([[1.0, 0.0]]).expand(2, 2)
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    noise = torch.zeros(2, 2)
    drafts = torch.tensor([0, 0])
    accepted, following = rejection_sample(target, draft, drafts, bounds, torch.zeros(2), noise)
    assert (accepted.item(), following.item()) == (0, 1)


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    bounds = torch.zeros(3, dtype=torch.int32)
    assert accept_drafts(none, none, bounds).tolist() == [0, 0]
    empty = torch.zeros(0, 4)
    accepted, following = rejection_sample(empty, empty, none, bounds, empty[:, 0], empty)
    assert accepted.tolist() == [0, 0] and following.tolist() == [-1, -1]
